"""Named workloads, including those of papers on this subject.

Pure data and one function. `bursty` and `priority` follow Flying Serving (arXiv 2602.22593),
sections 6.1.3 and 6.3: low load of 2-5 and bursts of 10-30 requests per second, about 4 000
requests, lengths drawn uniformly; priority requests among normal ones at 3-5 per second. The rates
pass through those ranges in fixed steps, so every seed has the same phases and reaches both ends.
Lengths in tokens, shares and tiers are our choice.
"""

from dataclasses import dataclass, replace

from loadgen.errors import UsageError
from loadgen.workload.arrivals import Phase, scaled_phases
from loadgen.workload.lengths import Lengths, LogNormal, Uniform, scaled, scaled_tokens
from loadgen.workload.plan import Mixture, Part, Sessions, Workload

PRESET_MAX_IN_FLIGHT = 4_000
"""High, because presets queue for long on a slow server and must not be dropped."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named workload: its arrivals and its requests."""

    about: str
    phases: tuple[Phase, ...]
    workload: Workload


def resized(
    preset: Preset,
    *,
    rate_scale: float,
    length_scale: float,
    duration_s: float | None,
    think_s: float | None = None,
) -> Preset:
    """Return the preset with scaled rates and lengths, stretched to `duration_s` if given.

    `think_s` is the mean pause of its sessions, None for the preset's own. Raises `UsageError`
    above the limits of a run or of a length, and for a pause without sessions.
    """
    workload = scaled_workload(preset.workload, length_scale)
    if think_s is not None:
        workload = tuple(
            replace(part, mixture=_thinking(part.mixture, think_s)) for part in workload
        )
    return Preset(
        preset.about,
        scaled_phases(preset.phases, rate_scale=rate_scale, duration_s=duration_s),
        workload,
    )


def _thinking(mixture: Mixture, think_s: float) -> Mixture:
    if mixture.sessions is None:
        raise UsageError("--think-time goes with a preset of sessions: agentic.")
    return replace(mixture, sessions=replace(mixture.sessions, think_s=think_s))


def scaled_workload(workload: Workload, factor: float) -> Workload:
    """Return the workload with every prompt, prefix and answer `factor` times as long."""
    return tuple(replace(part, mixture=_scaled_mixture(part.mixture, factor)) for part in workload)


def _scaled_mixture(mixture: Mixture, factor: float) -> Mixture:
    sessions = mixture.sessions
    if sessions is not None:
        sessions = replace(sessions, tool=scaled(sessions.tool, factor))
    return Mixture(
        prompt=scaled(mixture.prompt, factor),
        output=scaled(mixture.output, factor),
        tiers=mixture.tiers,
        prefix_groups=mixture.prefix_groups,
        shared_prefix_tokens=scaled_tokens(mixture.shared_prefix_tokens, factor),
        sessions=sessions,
    )


def _part(weight: float, tier: str, prompt: Lengths, output: Lengths) -> Part:
    return Part(weight, Mixture(prompt, output, ((tier, 1.0),), 0, 0))


def _waves(low: tuple[float, ...], high: tuple[float, ...], each_s: float) -> tuple[Phase, ...]:
    """Return alternating low and high phases, named by their rates; begins and ends low."""
    assert len(low) == len(high) + 1
    names = [f"low-{rate:g}" for rate in low], [f"burst-{rate:g}" for rate in high]
    lows = [Phase(name, rate, each_s) for name, rate in zip(names[0], low, strict=True)]
    highs = [Phase(name, rate, each_s) for name, rate in zip(names[1], high, strict=True)]
    pairs = zip(lows, highs, strict=False)
    return (*(phase for pair in pairs for phase in pair), lows[-1])


CHAT_PROMPT, CHAT_OUTPUT = Uniform(128, 2048), Uniform(64, 512)
BURSTS = _waves((2, 3, 4, 5), (10, 20, 30), 54.0)
CHAT_RATE, DOCUMENT_RATE = 6.4, 16.5

PRESETS = {
    "bursty": Preset(
        "low load of 2-5/s and bursts of 10, 20 and 30/s in turn, one tier",
        BURSTS,
        (_part(1, "standard", CHAT_PROMPT, CHAT_OUTPUT),),
    ),
    "priority": Preset(
        "3-5/s, one request in five interactive, the others standard",
        tuple(Phase(f"rate-{rate:g}-{turn}", rate, 50.0) for turn in (1, 2) for rate in (3, 5, 4)),
        (
            _part(0.2, "interactive", CHAT_PROMPT, CHAT_OUTPUT),
            _part(0.8, "standard", CHAT_PROMPT, CHAT_OUTPUT),
        ),
    ),
    "long-context": Preset(
        "3/s, one prompt in twenty of 16 000 to 64 000 tokens",
        (Phase("steady", 3, 300.0),),
        (
            _part(0.95, "standard", CHAT_PROMPT, CHAT_OUTPUT),
            _part(0.05, "standard", Uniform(16_000, 64_000), CHAT_OUTPUT),
        ),
    ),
    "mixed": Preset(
        "the phases of bursty with three tiers and one long prompt in fifty",
        BURSTS,
        (
            _part(0.2, "interactive", Uniform(64, 1024), Uniform(32, 256)),
            _part(0.58, "standard", CHAT_PROMPT, CHAT_OUTPUT),
            _part(0.2, "batch", Uniform(512, 4096), Uniform(128, 512)),
            _part(0.02, "standard", Uniform(16_000, 64_000), CHAT_OUTPUT),
        ),
    ),
    "documents": Preset(
        "6.4/s of interactive chat; twice 16.5/s of long documents beside it for 15 s",
        (
            Phase("chat-1", CHAT_RATE, 22.5),
            Phase("documents-1", CHAT_RATE + DOCUMENT_RATE, 15.0),
            Phase("chat-2", CHAT_RATE, 45.0),
            Phase("documents-2", CHAT_RATE + DOCUMENT_RATE, 15.0),
            Phase("chat-3", CHAT_RATE, 22.5),
        ),
        (
            _part(
                CHAT_RATE,
                "interactive",
                LogNormal(300, 0.5, 16, 4096),
                LogNormal(400, 0.5, 8, 2048),
            ),
            replace(
                _part(
                    DOCUMENT_RATE,
                    "standard",
                    LogNormal(4_000, 0.5, 256, 32_000),
                    LogNormal(50, 0.5, 4, 512),
                ),
                phases=frozenset({1, 3}),
            ),
        ),
    ),
    "batch": Preset(
        "12/s of long jobs, all batch: throughput is what counts",
        (Phase("steady", 12, 300.0),),
        (_part(1, "batch", Uniform(512, 4096), Uniform(256, 1024)),),
    ),
    "interactive": Preset(
        "4/s of chat, all interactive: latency is what counts",
        (Phase("steady", 4, 300.0),),
        (
            _part(
                1,
                "interactive",
                LogNormal(300, 0.8, 16, 4096),
                LogNormal(150, 0.7, 8, 1024),
            ),
        ),
    ),
    "agentic": Preset(
        "0.4/s coding agents of 4 to 16 turns, each turn with the whole conversation before it",
        (Phase("steady", 0.4, 300.0),),
        (
            Part(
                1,
                Mixture(
                    prompt=Uniform(32, 512),
                    output=LogNormal(150, 0.7, 8, 1024),
                    tiers=(("standard", 1.0),),
                    prefix_groups=1,
                    shared_prefix_tokens=4096,
                    sessions=Sessions(
                        turns=Uniform(4, 16), tool=LogNormal(800, 1.2, 16, 4096), think_s=2.0
                    ),
                ),
            ),
        ),
    ),
}
