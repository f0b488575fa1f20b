"""The command line: every option of `run`, `plot` and `compare`, with its help.

Only names, defaults and help; `config` interprets the values and refuses bad ones. A wrong command
line is answered with one sentence on stderr and exit status 2.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from loadgen.client.answer import Endpoint
from loadgen.report.slo import DEFAULT_SLOS
from loadgen.workload.arrivals import ArrivalKind
from loadgen.workload.load import DEFAULT_OUTPUT, DEFAULT_PROMPT
from loadgen.workload.presets import PRESETS
from loadgen.workload.prompts import PromptKind

EXIT_BAD_INPUT = 2
LENGTH_HELP = (
    "fixed:128, uniform:16-256, lognormal:mean=120,sigma=0.6,max=512 "
    "or mix:0.8*fixed:32+0.2*fixed:512"
)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that answers a mistake with one sentence instead of its usage."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and exit."""
        sys.stderr.write(f"{self.prog}: {message} (see {self.prog} --help)\n")
        sys.exit(EXIT_BAD_INPUT)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m loadgen`."""
    parser = OneLineParser(
        prog="loadgen",
        description="Load generator for OpenAI-compatible HTTP servers.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|plot|compare")
    run = commands.add_parser("run", help="send requests and report", allow_abbrev=False)
    _add_load(run)
    _add_requests(run)
    _add_client(run)
    _add_results(run)
    _add_plot(commands.add_parser("plot", help="draw a report", allow_abbrev=False))
    _add_compare(commands.add_parser("compare", help="compare reports", allow_abbrev=False))
    return parser


def _add_load(run: argparse.ArgumentParser) -> None:
    load = run.add_argument_group("load: one of --phases, --rate, --preset, --trace, --concurrency")
    load.add_argument("--phases", metavar="SPEC", help="low:2/s:20s,high:12/s:20s,low:2/s:20s")
    load.add_argument("--cycles", type=int, default=1, metavar="N", help="repeat --phases N times")
    load.add_argument("--rate", type=float, metavar="PER_S", help="requests per second")
    load.add_argument(
        "--preset", choices=[*PRESETS], metavar="NAME", help=f"a workload: {', '.join(PRESETS)}"
    )
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="CSV with the columns of BurstGPT or Azure"
    )
    load.add_argument("--trace-start", metavar="TIME", help="skip this much of the trace")
    load.add_argument(
        "--duration", metavar="TIME", help="with --rate, --preset or --trace: 30, 30s or 2m"
    )
    load.add_argument(
        "--rate-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="X times as many requests a second",
    )
    load.add_argument(
        "--length-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="prompts and answers X times as long",
    )
    load.add_argument(
        "--arrivals", choices=[*ArrivalKind], help="how sends are spread; default: poisson"
    )
    load.add_argument("--burst-size", type=int, default=8, metavar="N", help="with burst")
    load.add_argument(
        "--think-time",
        metavar="TIME",
        help="with --preset agentic: mean pause between an answer and the next turn; default: 2s",
    )
    load.add_argument("--concurrency", type=int, metavar="N", help="closed loop: N in flight")
    load.add_argument("--requests", type=int, metavar="M", help="closed loop: M requests in all")
    load.add_argument("--seed", type=int, default=0, help="same seed, same plan")


def _add_requests(run: argparse.ArgumentParser) -> None:
    requests = run.add_argument_group("requests")
    requests.add_argument("--model", metavar="NAME", help="default: first of /v1/models")
    requests.add_argument("--endpoint", choices=[*Endpoint], default="completions")
    requests.add_argument(
        "--prompt-tokens", metavar="LENGTH", help=f"{LENGTH_HELP}; default: {DEFAULT_PROMPT}"
    )
    requests.add_argument(
        "--output-tokens", metavar="LENGTH", help=f"the same forms; default: {DEFAULT_OUTPUT}"
    )
    requests.add_argument("--prompt-kind", choices=[*PromptKind], default="words")
    requests.add_argument("--vocab-size", type=int, metavar="N", help="with --prompt-kind tokens")
    requests.add_argument(
        "--tokens-per-word", type=float, default=1.0, metavar="X", help="for word prompts"
    )
    requests.add_argument("--shared-prefix-tokens", type=int, default=0, metavar="N")
    requests.add_argument("--prefix-groups", type=int, default=1, metavar="G")
    requests.add_argument("--tiers", metavar="SPEC", help="interactive:0.2,standard:0.6,batch:0.2")
    requests.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers of exact length; default: with --preset and --trace",
    )
    requests.add_argument("--temperature", type=float, default=0.0, metavar="X")


def _add_client(run: argparse.ArgumentParser) -> None:
    client = run.add_argument_group("client")
    client.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    client.add_argument("--api-key-env", metavar="NAME", help="variable that holds the API key")
    client.add_argument("--timeout", default="120s", metavar="TIME", help="for each request")
    client.add_argument(
        "--admin-url", metavar="URL", help="aileron's admin port: note every switch of layout"
    )
    client.add_argument("--admin-key-env", metavar="NAME", help="variable that holds the admin key")
    client.add_argument("--max-in-flight", type=int, metavar="N", help="more are dropped")
    client.add_argument("--warmup-requests", type=int, default=0, metavar="N", help="not counted")


def _add_results(run: argparse.ArgumentParser) -> None:
    results = run.add_argument_group("results")
    results.add_argument("--out", type=Path, metavar="FILE", help="write the JSON report")
    results.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    results.add_argument("--records", action="store_true", help="keep every request in --out")
    results.add_argument(
        "--slo", default="", metavar="SPEC", help=f"TTFT/TPOT by tier; default: {DEFAULT_SLOS}"
    )
    results.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="one limit for all tiers")
    results.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="one limit for all tiers")
    results.add_argument("--quiet", action="store_true", help="no progress, no table")


def _add_plot(plot: argparse.ArgumentParser) -> None:
    plot.add_argument("report", type=Path)
    plot.add_argument("--out", type=Path, required=True, metavar="FILE", help=".png, .svg or .pdf")


def _add_compare(compare: argparse.ArgumentParser) -> None:
    compare.add_argument(
        "reports", type=Path, nargs="+", help="the baseline report, then the others"
    )
    compare.add_argument("--names", nargs="+", metavar="NAME", help="names of the runs")
    compare.add_argument("--scope", default="total", help="total, tier:NAME or phase:NAME")
    compare.add_argument("--json", type=Path, metavar="FILE", help="write all tables as JSON")
    compare.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables by phase and tier"
    )
    compare.add_argument("--plot", type=Path, metavar="FILE", help="draw the runs in one picture")
    compare.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit 1 if ttft_p50_ms>1.05 (ratio to the first) or b.failed>0 (own); may repeat",
    )
