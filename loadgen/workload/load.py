"""Which load to make: phases, a preset, a trace or a closed loop, and the form of its requests.

Everything is checked here, so that nothing is refused later. A preset or a trace brings its own
lengths; options that it would ignore are refused.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from loadgen.errors import UsageError
from loadgen.ranges import above_zero, whole
from loadgen.workload.arrivals import (
    ArrivalKind,
    Phase,
    check_phases,
    parse_duration_s,
    parse_phases,
    scaled_phases,
)
from loadgen.workload.lengths import MAX_LENGTH_TOKENS, parse_lengths, scaled_tokens
from loadgen.workload.plan import Mixture, Part, Workload, parse_tiers
from loadgen.workload.presets import PRESET_MAX_IN_FLIGHT, PRESETS, resized, scaled_workload
from loadgen.workload.traces import Trace, Window, read_trace, sped_up

MAX_IN_FLIGHT_REQUESTS = 10_000
DEFAULT_IN_FLIGHT_REQUESTS = 1_000
MAX_CLOSED_REQUESTS = 200_000
MAX_PREFIX_GROUPS = 100_000
DEFAULT_PROMPT, DEFAULT_OUTPUT = "fixed:128", "fixed:64"


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """Requests at planned times, whatever the server does; `preset` names their origin."""

    phases: tuple[Phase, ...]
    kind: ArrivalKind
    burst_requests: int
    max_in_flight: int
    preset: str | None = None

    @property
    def exact_lengths(self) -> bool:
        """Whether answers have the planned lengths by default."""
        return self.preset is not None


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Requests at the times and with the lengths of a trace."""

    trace: Trace
    source: Path
    length_scale: float
    max_in_flight: int

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The whole window as one phase."""
        length_s = self.trace.duration_s
        return (Phase("trace", len(self.trace.rows) / length_s, length_s),)

    @property
    def exact_lengths(self) -> bool:
        """Whether answers have the planned lengths by default."""
        return True


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """`requests` requests, at most `concurrency` in flight."""

    concurrency: int
    requests: int

    @property
    def exact_lengths(self) -> bool:
        """Whether answers have the planned lengths by default."""
        return False


Load = OpenLoad | TraceLoad | ClosedLoad


def parse_load(args: argparse.Namespace) -> tuple[Load, Workload]:
    """Return the one load that was asked for, and its requests."""
    wanted = {
        "--phases": args.phases is not None,
        "--rate with --duration": args.rate is not None,
        "--preset": args.preset is not None,
        "--trace": args.trace is not None,
        "--concurrency with --requests": args.concurrency is not None or args.requests is not None,
    }
    given = [name for name, is_given in wanted.items() if is_given]
    if len(given) != 1:
        found = "nothing was given" if not given else f"{' as well as '.join(given)} were given"
        raise UsageError(
            f"Say which load to make with exactly one of {', '.join(wanted)}; {found}."
        )
    _check_companions(args)
    if args.preset is not None:
        return _parse_preset(args)
    if args.trace is not None:
        return _parse_trace(args)
    workload = scaled_workload((Part(1.0, _parse_mixture(args)),), _length_scale(args))
    if args.concurrency is not None or args.requests is not None:
        return _parse_closed(args), workload
    return _open_load(args, _parse_phases(args), _max_in_flight(args)), workload


def _check_companions(args: argparse.Namespace) -> None:
    """Refuse options that belong to another kind of load."""
    closed = args.concurrency is not None or args.requests is not None
    timed = args.rate is not None or args.preset is not None or args.trace is not None
    lengths = [args.prompt_tokens, args.output_tokens]
    own_prefix = bool(args.shared_prefix_tokens or args.prefix_groups != 1)
    refused = (
        (
            args.duration is not None and not timed,
            "--duration goes with --rate, --preset or --trace; phases have their own.",
        ),
        (
            args.cycles != 1 and args.phases is None,
            "--cycles repeats --phases; elsewhere make --duration longer.",
        ),
        (
            args.rate_scale != 1 and closed,
            "--rate-scale needs a load with a rate; a closed loop has none.",
        ),
        (
            args.trace_start is not None and args.trace is None,
            "--trace-start goes with --trace.",
        ),
        (
            args.think_time is not None and args.preset is None,
            "--think-time goes with --preset agentic.",
        ),
        (
            args.arrivals is not None and args.trace is not None,
            "--trace has its own send times; leave out --arrivals.",
        ),
        (
            any(length is not None for length in lengths)
            and (args.preset is not None or args.trace is not None),
            "--preset and --trace have their own lengths; leave out --prompt-tokens and "
            "--output-tokens, or use --length-scale.",
        ),
        (
            args.preset is not None and (args.tiers is not None or own_prefix),
            "--preset has its own tiers and prefixes; leave out --tiers, --shared-prefix-tokens "
            "and --prefix-groups.",
        ),
    )
    for is_refused, sentence in refused:
        if is_refused:
            raise UsageError(sentence)


def _parse_preset(args: argparse.Namespace) -> tuple[Load, Workload]:
    preset = resized(
        PRESETS[args.preset],
        rate_scale=above_zero("--rate-scale", args.rate_scale),
        length_scale=_length_scale(args),
        duration_s=None if args.duration is None else parse_duration_s(args.duration),
        think_s=None if args.think_time is None else parse_duration_s(args.think_time),
    )
    max_in_flight = _max_in_flight(args, PRESET_MAX_IN_FLIGHT)
    return _open_load(args, preset.phases, max_in_flight), preset.workload


def _parse_trace(args: argparse.Namespace) -> tuple[Load, Workload]:
    rate_scale = above_zero("--rate-scale", args.rate_scale)
    length_scale = _length_scale(args)
    start_s = 0.0 if args.trace_start is None else parse_duration_s(args.trace_start)
    length_s = None if args.duration is None else parse_duration_s(args.duration) * rate_scale
    trace = sped_up(read_trace(args.trace, Window(start_s, length_s)), rate_scale)
    for row in trace.rows:
        scaled_tokens(max(row.prompt_tokens, row.output_tokens), length_scale)
    load = TraceLoad(trace, args.trace, length_scale, _max_in_flight(args, PRESET_MAX_IN_FLIGHT))
    check_phases(load.phases)
    return load, (Part(1.0, _parse_mixture(args)),)


def _open_load(args: argparse.Namespace, phases: tuple[Phase, ...], max_in_flight: int) -> OpenLoad:
    return OpenLoad(
        phases=phases,
        kind=ArrivalKind(args.arrivals or ArrivalKind.POISSON),
        burst_requests=whole("--burst-size", args.burst_size, 1, MAX_IN_FLIGHT_REQUESTS),
        max_in_flight=max_in_flight,
        preset=args.preset,
    )


def _parse_phases(args: argparse.Namespace) -> tuple[Phase, ...]:
    rate_scale = above_zero("--rate-scale", args.rate_scale)
    if args.phases is not None:
        phases = parse_phases(args.phases, cycles=args.cycles)
    elif args.duration is None:
        raise UsageError("--rate and --duration need one another.")
    else:
        rate_per_s = above_zero("--rate", args.rate)
        phases = check_phases((Phase("steady", rate_per_s, parse_duration_s(args.duration)),))
    return scaled_phases(phases, rate_scale=rate_scale, duration_s=None)


def _parse_closed(args: argparse.Namespace) -> ClosedLoad:
    if args.concurrency is None or args.requests is None:
        raise UsageError("--concurrency and --requests need one another.")
    max_in_flight = _max_in_flight(args)
    return ClosedLoad(
        concurrency=whole("--concurrency", args.concurrency, 1, max_in_flight),
        requests=whole("--requests", args.requests, 1, MAX_CLOSED_REQUESTS),
    )


def _max_in_flight(args: argparse.Namespace, default: int = DEFAULT_IN_FLIGHT_REQUESTS) -> int:
    wanted = default if args.max_in_flight is None else args.max_in_flight
    return whole("--max-in-flight", wanted, 1, MAX_IN_FLIGHT_REQUESTS)


def _length_scale(args: argparse.Namespace) -> float:
    return above_zero("--length-scale", args.length_scale)


def _parse_mixture(args: argparse.Namespace) -> Mixture:
    prefix_tokens = whole("--shared-prefix-tokens", args.shared_prefix_tokens, 0, MAX_LENGTH_TOKENS)
    groups = whole("--prefix-groups", args.prefix_groups, 1, MAX_PREFIX_GROUPS)
    if groups > 1 and prefix_tokens == 0:
        raise UsageError("--prefix-groups needs --shared-prefix-tokens.")
    return Mixture(
        prompt=parse_lengths(args.prompt_tokens or DEFAULT_PROMPT),
        output=parse_lengths(args.output_tokens or DEFAULT_OUTPUT),
        tiers=parse_tiers(args.tiers or ""),
        prefix_groups=groups if prefix_tokens else 0,
        shared_prefix_tokens=prefix_tokens,
    )
