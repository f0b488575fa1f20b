"""Boxes and load shapes for simulations of the policy.

The boxes' numbers were measured with static vLLM on four H200s: the time of a step of one token, of
one of 4,096 tokens, and the KV room of one device; the cost of context is a token's KV over the
memory bandwidth that decodes reach.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.model.cost_model import CostModel, GroupCost, SwitchCost
from coordinator.model.step_line import StepLine
from coordinator.protocol.terms import Tier
from tools.simulator.cell import Arrival

BANDWIDTH = 4.0e12
"""Bytes per second that a decode reads, of an H200's 4.8e12."""


def box(measured: dict[int, tuple[float, float]], capacity_tokens: int, kv_bytes: int) -> CostModel:
    """The cost model of a box; `measured` gives per width the ms of 1 and of 4,096 tokens."""
    groups = {}
    for width, (one_ms, many_ms) in measured.items():
        token_s = (many_ms - one_ms) / 4_095 / 1000
        line = StepLine(one_ms / 1000 - token_s, token_s, kv_bytes / BANDWIDTH / width)
        name = "dp1" if width == 1 else f"tp{width}"
        groups[name] = GroupCost(line, line, capacity_tokens * width)
    return CostModel(groups, SwitchCost(0.05, kv_bytes, 300e9))


LLAMA_70B_FP8 = box({1: (21.6, 468), 2: (14.0, 295), 4: (9.6, 196)}, 149_000, 327_680)
LLAMA_8B = box({1: (5.0, 97), 4: (2.82, 44.7)}, 816_000, 131_072)
QWEN_32B = box({1: (19.2, 419), 2: (11.7, 242), 4: (7.8, 143)}, 214_000, 262_144)


def lent(costs: CostModel, floors_ms: dict[str, float], capacity_tokens: int) -> CostModel:
    """The same box where ranks hold parts of the weights: steps have floors, and KV more room."""
    groups = {
        name: replace(
            each,
            capacity_tokens=capacity_tokens * (1 if name == "dp1" else int(name[2:])),
            floor_s=floors_ms.get(name, 0.0) / 1000,
            prefill_floor_s=floors_ms.get(name, 0.0) / 1000,
        )
        for name, each in costs.groups.items()
    }
    return replace(costs, groups=groups)


QWEN_32B_HALVES = lent(QWEN_32B, {"dp1": 67.5, "tp2": 33.7}, 308_000)
"""Halves of the feed-forward layers: a rank alone borrows one, each of a pair a quarter."""


@dataclass(frozen=True)
class Part:
    """What a tier does in a phase: requests per second, mean lengths."""

    tier: Tier
    rate: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Phase:
    """Some seconds of a load."""

    seconds: float
    parts: tuple[Part, ...]


def busiest_rate(costs: CostModel, ranks: int, prompt: int, output: int) -> float:
    """Requests per second of these lengths at which `ranks` dp ranks are busy all the time."""
    cost = costs.groups["dp1"]
    context = prompt + output / 2
    tasks = max(1.0, min(cost.tasks_max, cost.capacity_tokens / context))
    step_s = max(cost.floor_s, cost.decode.seconds(tasks, tasks * context))
    return ranks / (cost.prefill.token_s * prompt + output * step_s / tasks)


def arrivals(phases: Sequence[Phase], seed: int, spread: float = 0.5) -> list[Arrival]:
    """Poisson arrivals with log-normal lengths whose logarithms deviate by `spread`."""
    draw = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, round(mean * math.exp(draw.gauss(-spread * spread / 2, spread))))

    found = []
    start_s = 0.0
    for phase in phases:
        for part in phase.parts:
            at_s = start_s + draw.expovariate(part.rate) if part.rate else math.inf
            while at_s < start_s + phase.seconds:
                found.append(Arrival(at_s, part.tier, length(part.prompt), length(part.output)))
                at_s += draw.expovariate(part.rate)
        start_s += phase.seconds
    return sorted(found, key=lambda each: each.at_s)


def bursty(draw: random.Random) -> list[Phase]:
    """Two to five requests per second, then ten to thirty, again and again."""
    phases = []
    for _ in range(3):
        for low, high, seconds in ((2, 5, 12), (10, 30, 8)):
            rate = draw.uniform(low, high)
            phases.append(Phase(seconds, (Part(Tier.STANDARD, rate, 1_000, 150),)))
    return phases


def mixed(draw: random.Random) -> list[Phase]:
    """Interactive requests come and go among batch work."""
    phases = []
    for index in range(5):
        rate = draw.uniform(1, 4) if index % 2 else draw.uniform(4, 9)
        batch = draw.uniform(6, 12)
        phases.append(
            Phase(
                12,
                (
                    Part(Tier.INTERACTIVE, rate, 800, 200),
                    Part(Tier.BATCH, batch, 1_000, 150),
                ),
            )
        )
    return phases


def any_shape(seed: int) -> list[Phase]:
    """A random load: phases of random tiers, lengths and rates, from idle to overload."""
    draw = random.Random(seed)
    lengths = [(200, 200), (1_000, 150), (4_000, 200), (1_000, 600), (8_000, 100)]
    kinds = {tier: draw.choice(lengths) for tier in Tier}
    present = draw.sample(list(Tier), draw.choice((1, 1, 2, 3)))
    phases = []
    for _ in range(draw.choice((2, 3, 4))):
        load = draw.choice((0.05, 0.2, 0.5, 0.8, 1.0, 1.2))
        shares = [draw.random() for _ in present]
        parts = []
        for tier, share in zip(present, shares, strict=True):
            prompt, output = kinds[tier]
            tokens_s = 27_000 * load * share / sum(shares)
            parts.append(Part(tier, tokens_s / (prompt + 1.5 * output), prompt, output))
        phases.append(Phase(draw.uniform(8, 16), tuple(parts)))
    return phases
