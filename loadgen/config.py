"""The configuration of `run`: parsed once from the command line, checked, then frozen.

Everything that can be refused is refused here with one sentence, before a request is sent: ranges,
unreadable phases or lengths, and options that exclude one another.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from loadgen.client.answer import Endpoint
from loadgen.errors import UsageError
from loadgen.ranges import above_zero, at_least_zero, optional_above_zero, whole
from loadgen.report.slo import ALL_TIERS, Slo, Slos, parse_slos
from loadgen.workload.arrivals import parse_duration_s
from loadgen.workload.load import Load, parse_load
from loadgen.workload.plan import Workload
from loadgen.workload.prompts import PromptKind, PromptStyle

MAX_TIMEOUT_S = 24 * 3600.0
MAX_WARMUP_REQUESTS = 1_000
MAX_VOCAB_SIZE = 10_000_000
KEY_OPTIONS = {"--url": "--api-key-env", "--admin-url": "--admin-key-env"}


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
    admin_url: str | None
    load: Load
    workload: Workload
    prompt: PromptStyle
    seed: int
    temperature: float
    ignore_eos: bool
    timeout_s: float
    warmup_requests: int
    slos: Slos
    outputs: Outputs


def parse_run(args: argparse.Namespace) -> RunConfig:
    """Check the arguments of `run` and freeze them."""
    endpoint, kind = Endpoint(args.endpoint), PromptKind(args.prompt_kind)
    if kind is PromptKind.TOKENS and endpoint is Endpoint.CHAT:
        raise UsageError("Chat takes text only: use --prompt-kind words or --endpoint completions.")
    if kind is PromptKind.TOKENS and args.vocab_size is None:
        raise UsageError("--prompt-kind tokens needs --vocab-size, the number of token ids.")
    load, workload = parse_load(args)
    return RunConfig(
        url=parse_url(args.url),
        admin_url=None if args.admin_url is None else parse_url(args.admin_url, "--admin-url"),
        model=args.model,
        endpoint=endpoint,
        load=load,
        workload=workload,
        prompt=PromptStyle(
            kind=kind,
            seed=args.seed,
            vocab_size=whole("--vocab-size", args.vocab_size or 1, 1, MAX_VOCAB_SIZE),
            tokens_per_word=above_zero("--tokens-per-word", args.tokens_per_word),
        ),
        seed=args.seed,
        temperature=at_least_zero("--temperature", args.temperature),
        ignore_eos=load.exact_lengths if args.ignore_eos is None else args.ignore_eos,
        timeout_s=_timeout_s(args.timeout),
        warmup_requests=whole("--warmup-requests", args.warmup_requests, 0, MAX_WARMUP_REQUESTS),
        slos=_parse_slos(args),
        outputs=Outputs(args.out, args.plot, args.records, args.quiet),
    )


def parse_url(text: str, option: str = "--url") -> str:
    """Return the server's root: scheme, host and path, without a trailing slash or `/v1`."""
    parts = urlsplit(text.strip())
    try:
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        port_is_right = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_right:
        raise UsageError(f"'{text}' is not a server address like http://127.0.0.1:8000.")
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            f"{option} takes no user name, query or fragment; for a key use {KEY_OPTIONS[option]}."
        )
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _parse_slos(args: argparse.Namespace) -> Slos:
    ttft_ms = optional_above_zero("--slo-ttft-ms", args.slo_ttft_ms)
    tpot_ms = optional_above_zero("--slo-tpot-ms", args.slo_tpot_ms)
    if ttft_ms is None and tpot_ms is None:
        return parse_slos(args.slo)
    if args.slo:
        raise UsageError("--slo is by tier, --slo-ttft-ms and --slo-tpot-ms for all; use one way.")
    return Slos({ALL_TIERS: Slo(ttft_ms, tpot_ms)})


def _timeout_s(text: str) -> float:
    seconds = parse_duration_s(text)
    if seconds > MAX_TIMEOUT_S:
        raise UsageError(f"--timeout must be at most {MAX_TIMEOUT_S:.0f} s, not {seconds:g} s.")
    return seconds
