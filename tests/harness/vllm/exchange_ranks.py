"""`python -m tests.harness.vllm.exchange_ranks FILE`: two ranks exchange heads and tokens.

vLLM is imported once, by the process that forks the ranks: it has neither threads nor a device.
"""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comm_pool.head_exchange import HeadExchange
from tests.harness.vllm.mover_ranks import World, run_ranks
from worker.engine.sequence_parallel.exchange import Exchange, prove_exchange
from worker.engine.weights.layers import ViewError

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 150
PLAN = HeadExchange(heads=8, kv_heads=2, width=2)
PART_FAULTS = ("no fault in parts", "left out", "order")


class Group:
    """The part of vLLM's GroupCoordinator that an exchange uses, over gloo."""

    def __init__(self, world: World) -> None:
        self.rank_in_group = world.rank
        self.device_group = world.cpu_group
        self.device_communicator = None
        self._size = world.size

    def all_gather(self, rows: torch.Tensor, _dim: int) -> torch.Tensor:
        """Rows of all members behind each other."""
        parts = [torch.empty_like(rows) for _ in range(self._size)]
        dist.all_gather(parts, rows.contiguous(), group=self.device_group)
        return torch.cat(parts)


def prove(world: World, fault: str) -> str:
    """Prove an exchange that has this fault; returns what is said, or nothing."""

    class Faulty(Exchange):
        def to_heads(self, rows: torch.Tensor) -> torch.Tensor:
            if fault == "tokens":
                return super().to_heads(rows).roll(1, 0)
            if fault == "heads":
                return super().to_heads(rows.roll(1, 1))
            return super().to_heads(rows)

        def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
            found = super().to_tokens(rows)
            return found.roll(1, 1) if fault == "back" else found

        def _ranges(self, share: int) -> list[range]:
            found = super()._ranges(share)
            if fault == "left out" and len(found) > 2:
                return [found[0], found[0], *found[2:]]
            return [*reversed(found)] if fault == "order" else found

    group: Any = Group(world)
    exchange = Faulty(PLAN, group)
    if fault in PART_FAULTS:
        exchange.parts_tried = (1, 2, 4)
    try:
        prove_exchange(exchange, torch.device("cpu"))
    except ViewError as error:
        return str(error)
    return ""


def share_out(world: World, tokens: int) -> tuple[list[float], list[float]]:
    """What this rank gets of 1..tokens, and what all get back together."""
    group: Any = Group(world)
    exchange = Exchange(PLAN, group)
    exchange.tokens = tokens
    rows = torch.arange(1.0, tokens + 1)[:, None]
    mine = exchange.own_tokens(rows)
    return mine[:, 0].tolist(), exchange.all_tokens(mine)[:, 0].tolist()


def in_parts(world: World, tokens: int, parts: int) -> tuple[list[int], list[float]]:
    """How many rows each product has, and by how much results differ from those of one part."""
    group: Any = Group(world)
    exchange = Exchange(PLAN, group)
    exchange.tokens = tokens
    columns = PLAN.heads_each + PLAN.kv_heads_each
    draw = torch.Generator().manual_seed(world.rank)
    hidden = torch.randn(PLAN.share(tokens), 16, generator=draw, dtype=torch.float64)
    into = torch.randn(16, 2 * columns, generator=draw.manual_seed(7), dtype=torch.float64)
    heads = torch.randn(tokens, PLAN.heads_each, generator=draw, dtype=torch.float64)
    out_of = torch.randn(PLAN.heads, 16, generator=draw.manual_seed(8), dtype=torch.float64)
    rows: list[int] = []

    def times(weight: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        rows.append(given.shape[0])
        return given @ weight

    whole: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    for results in (whole, found):
        results.append(exchange.computed_to_heads(lambda part: times(into, part), hidden))
        results.append(exchange.computed_on_tokens(lambda part: times(out_of, part), heads))
        exchange.parts_from = ((0, 1), (5, parts), (tokens + 1, 8))
    return rows, [float((a - b).abs().max()) for a, b in zip(whole, found, strict=True)]


def everything(world: World) -> tuple[dict[str, str], Any, Any]:
    """All cases, for which vLLM is imported once."""
    said = {fault: prove(world, fault) for fault in ("none", "tokens", "heads", "back")}
    said |= {fault: prove(world, fault) for fault in PART_FAULTS}
    shares = [share_out(world, tokens) for tokens in (1, 5, 6)]
    return said, shares, [in_parts(world, *case) for case in ((4, 4), (9, 2), (9, 8), (513, 4))]


def exchanged(file: Path) -> list[Any]:
    """What each rank found, in processes of their own."""
    subprocess.run(
        [sys.executable, "-m", "tests.harness.vllm.exchange_ranks", str(file)],
        cwd=ROOT,
        timeout=LIMIT_S,
        check=True,
    )
    answers: list[Any] = pickle.loads(file.read_bytes())
    return answers


if __name__ == "__main__":
    found = run_ranks(2, everything, limit_s=LIMIT_S, method="fork")
    Path(sys.argv[1]).write_bytes(pickle.dumps(found))
