"""What `run` was asked to do: parsed once from the command line, checked, then frozen.

Everything that can be refused is refused here with one sentence, before a request is sent:
ranges, unreadable phases or lengths, and options that exclude one another.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from loadgen.answer import Endpoint
from loadgen.arrivals import (
    ArrivalKind,
    Phase,
    check_phases,
    parse_duration_s,
    parse_phases,
)
from loadgen.errors import UsageError
from loadgen.lengths import MAX_LENGTH_TOKENS, parse_lengths
from loadgen.plan import Mixture, parse_tiers
from loadgen.prompts import PromptKind, PromptStyle
from loadgen.report import Slo

MAX_IN_FLIGHT_REQUESTS = 10_000
MAX_CLOSED_REQUESTS = 200_000
MAX_TIMEOUT_S = 24 * 3600.0
MAX_WARMUP_REQUESTS = 1_000
MAX_PREFIX_GROUPS = 100_000
MAX_VOCAB_SIZE = 10_000_000


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """Requests at planned times, whatever the server does."""

    phases: tuple[Phase, ...]
    kind: ArrivalKind
    burst_requests: int
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """`requests` requests, always `concurrency` of them in flight."""

    concurrency: int
    requests: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the results go."""

    report: Path | None
    plot: Path | None
    keep_records: bool
    quiet: bool


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A whole run; `model` None means the first one that the server lists."""

    url: str
    model: str | None
    endpoint: Endpoint
    load: OpenLoad | ClosedLoad
    mixture: Mixture
    prompt: PromptStyle
    seed: int
    temperature: float
    ignore_eos: bool
    timeout_s: float
    warmup_requests: int
    slo: Slo
    outputs: Outputs


def parse_run(args: argparse.Namespace) -> RunConfig:
    """Check the arguments of `run` and freeze them."""
    endpoint, kind = Endpoint(args.endpoint), PromptKind(args.prompt_kind)
    if kind is PromptKind.TOKENS and endpoint is Endpoint.CHAT:
        raise UsageError("Chat takes text only: use --prompt-kind words or --endpoint completions.")
    if kind is PromptKind.TOKENS and args.vocab_size is None:
        raise UsageError("--prompt-kind tokens needs --vocab-size, the number of token ids.")
    return RunConfig(
        url=parse_url(args.url),
        model=args.model,
        endpoint=endpoint,
        load=_parse_load(args),
        mixture=_parse_mixture(args),
        prompt=PromptStyle(
            kind=kind,
            seed=args.seed,
            vocab_size=_whole("--vocab-size", args.vocab_size or 1, 1, MAX_VOCAB_SIZE),
            tokens_per_word=_above_zero("--tokens-per-word", args.tokens_per_word),
        ),
        seed=args.seed,
        temperature=_at_least_zero("--temperature", args.temperature),
        ignore_eos=args.ignore_eos,
        timeout_s=_timeout_s(args.timeout),
        warmup_requests=_whole("--warmup-requests", args.warmup_requests, 0, MAX_WARMUP_REQUESTS),
        slo=Slo(
            _optional_limit("--slo-ttft-ms", args.slo_ttft_ms),
            _optional_limit("--slo-tpot-ms", args.slo_tpot_ms),
        ),
        outputs=Outputs(args.out, args.plot, args.records, args.quiet),
    )


def parse_url(text: str) -> str:
    """The server's root: scheme and host, without a trailing slash or `/v1`."""
    parts = urlsplit(text.strip())
    try:
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        port_is_right = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_right:
        raise UsageError(f"'{text}' is not a server address like http://127.0.0.1:8000.")
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            "--url takes no user name, query or fragment; for a key use --api-key-env."
        )
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _parse_load(args: argparse.Namespace) -> OpenLoad | ClosedLoad:
    wanted = {
        "--phases": args.phases is not None,
        "--rate and --duration": args.rate is not None or args.duration is not None,
        "--concurrency and --requests": args.concurrency is not None or args.requests is not None,
    }
    given = [name for name, is_given in wanted.items() if is_given]
    if len(given) != 1:
        said = "nothing was given" if not given else f"{' as well as '.join(given)} were given"
        raise UsageError(
            "Say which load to make with exactly one of --phases, --rate with --duration, "
            f"or --concurrency with --requests; {said}."
        )
    max_in_flight = _whole("--max-in-flight", args.max_in_flight, 1, MAX_IN_FLIGHT_REQUESTS)
    if args.concurrency is not None or args.requests is not None:
        return _parse_closed(args, max_in_flight)
    return OpenLoad(
        phases=_parse_open_phases(args),
        kind=ArrivalKind(args.arrivals),
        burst_requests=_whole("--burst-size", args.burst_size, 1, MAX_IN_FLIGHT_REQUESTS),
        max_in_flight=max_in_flight,
    )


def _parse_open_phases(args: argparse.Namespace) -> tuple[Phase, ...]:
    if args.phases is not None:
        return parse_phases(args.phases, cycles=args.cycles)
    if args.rate is None or args.duration is None:
        raise UsageError("--rate and --duration need one another.")
    if args.cycles != 1:
        raise UsageError("--cycles repeats --phases; with --rate make --duration longer.")
    rate_per_s = _above_zero("--rate", args.rate)
    return check_phases((Phase("steady", rate_per_s, parse_duration_s(args.duration)),))


def _parse_closed(args: argparse.Namespace, max_in_flight: int) -> ClosedLoad:
    if args.concurrency is None or args.requests is None:
        raise UsageError("--concurrency and --requests need one another.")
    return ClosedLoad(
        concurrency=_whole("--concurrency", args.concurrency, 1, max_in_flight),
        requests=_whole("--requests", args.requests, 1, MAX_CLOSED_REQUESTS),
    )


def _parse_mixture(args: argparse.Namespace) -> Mixture:
    prefix_tokens = _whole(
        "--shared-prefix-tokens", args.shared_prefix_tokens, 0, MAX_LENGTH_TOKENS
    )
    groups = _whole("--prefix-groups", args.prefix_groups, 1, MAX_PREFIX_GROUPS)
    if groups > 1 and prefix_tokens == 0:
        raise UsageError("--prefix-groups needs --shared-prefix-tokens.")
    return Mixture(
        prompt=parse_lengths(args.prompt_tokens),
        output=parse_lengths(args.output_tokens),
        tiers=parse_tiers(args.tiers),
        prefix_groups=groups if prefix_tokens else 0,
        shared_prefix_tokens=prefix_tokens,
    )


def _timeout_s(text: str) -> float:
    seconds = parse_duration_s(text)
    if seconds > MAX_TIMEOUT_S:
        raise UsageError(f"--timeout must be at most {MAX_TIMEOUT_S:.0f} s, not {seconds:g} s.")
    return seconds


def _whole(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise UsageError(f"{name} must be from {low} to {high}, not {value}.")
    return value


def _above_zero(name: str, value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise UsageError(f"{name} must be a number above 0, not {value:g}.")
    return value


def _at_least_zero(name: str, value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{name} must be a number of 0 or more, not {value:g}.")
    return value


def _optional_limit(name: str, value: float | None) -> float | None:
    return None if value is None else _above_zero(name, value)
