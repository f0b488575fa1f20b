"""The simulated cell against a real one: the same arrivals, and what requests saw in both.

A real cell serves a load in each fixed layout and under the adaptive policy, while it writes what
steps cost (its observation log). Then the simulated cell gets the requests that the clients really
sent, at the times they sent them, and the costs of that log. The error is stated, not judged.
`python -m tests.bench.simulated_run [--ranks N] [--preset NAME] [--duration S]`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from comm_pool.layout import parse_layout
from coordinator.model.observation_log import CostRecord, costs_of, decode, settings_of
from coordinator.policy.candidates import LayoutSpace
from coordinator.protocol.terms import Tier
from tests.harness.cells.admin import switch
from tests.harness.cells.servers import MODEL, ROOT, free_port, running
from tests.harness.runs.provenance import commit, cores_and_processor, today
from tools.simulator.cell import Arrival, RequestTimes, Run, SimCell, is_good

ADAPTIVE = "adaptive"
LOAD_LIMIT_S = 900
TAIL_S = 120.0
"""How long behind the last arrival the simulated cell may serve on."""
ENGINE_OPTIONS = [
    *("--max-model-len", "2048", "--max-num-seqs", "64", "--dtype", "bfloat16"),
    *("--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)),
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a load saw in one cell: times in ms, tokens per second, requests within their goals."""

    requests: int
    ttft_p50_ms: float
    ttft_p90_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    tokens_per_s: float
    good: int
    switches: int


@dataclass(frozen=True, slots=True)
class Compared:
    """One layout, in both cells."""

    name: str
    real: Outcome
    simulated: Outcome


def main() -> None:
    """Serve, simulate, print, and leave a dated JSON file and table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--layouts", default="dp2,tp2")
    parser.add_argument("--preset", default="bursty")
    parser.add_argument("--duration", type=float, default=120.0)
    parser.add_argument("--rate-scale", type=float, default=0.5)
    parser.add_argument("--length-scale", type=float, default=0.25)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    options = parser.parse_args()
    found = [compare(name, options) for name in [*options.layouts.split(","), ADAPTIVE]]
    write(found, options)


def compare(name: str, options: argparse.Namespace) -> Compared:
    """Serve the load in one layout, or by the policy, and simulate what was served."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "observations.jsonl"
        records, switches = serve(name, options, log)
        costs = newest_costs(log)
    print(f"{name}: {len(records)} requests served, now simulated", flush=True)
    layout = name if name != ADAPTIVE else f"dp{options.ranks}"
    real = outcome_of([seen_of(each) for each in records], costs, switches)
    run = simulate(records, costs, layout, is_adaptive=name == ADAPTIVE)
    return Compared(name, real, outcome_of(run.requests, costs, len(run.switches)))


def serve(name: str, options: argparse.Namespace, log: Path) -> tuple[list[dict[str, Any]], int]:
    """Run the load on a real cell; returns its whole answers and how often the cell switched."""
    port, admin_port = free_port(), free_port()
    config = log.with_name("cell.yaml")
    fields = {
        "model": {"path": options.model, "engine_args": ENGINE_OPTIONS},
        "policy": {"name": ADAPTIVE, "observation_log": str(log)},
    }
    config.write_text(yaml.safe_dump(fields))
    command = [
        *(sys.executable, "-m", "coordinator.cli", "up", "--config", str(config)),
        *("--ranks", str(options.ranks), "--device", options.device),
        *("--port", str(port), "--admin-port", str(admin_port)),
    ]
    admin = f"http://127.0.0.1:{admin_port}"
    with ExitStack() as stack:
        print(f"{name}: the cell starts", flush=True)
        url = stack.enter_context(running(command, port, "/ready"))
        warm = ["--concurrency", "4", "--requests", "24"]
        load(url, [*warm, "--prompt-tokens", "fixed:128"], log.with_name("warm.json"))
        if name != ADAPTIVE:
            switch(admin, name, "reshard")  # An operator's choice is left alone.
        report = load(url, _preset(options), log.with_name("load.json"), admin)
    whole = [each for each in report["records"] if each["error"] is None]
    if len(whole) < len(report["records"]):
        print(f"{name}: {len(report['records']) - len(whole)} requests failed", flush=True)
    return whole, len(report["switches"]["events"])


def load(url: str, options: list[str], out: Path, admin: str | None = None) -> dict[str, Any]:
    """One run of the load generator; returns its report with all records."""
    command = [
        *(sys.executable, "-m", "loadgen", "run", "--url", url, "--quiet", "--ignore-eos"),
        *("--records", "--out", str(out), *options),
        *(("--admin-url", admin) if admin else ()),
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LOAD_LIMIT_S)
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def _preset(options: argparse.Namespace) -> list[str]:
    return [
        *("--preset", options.preset, "--duration", str(options.duration)),
        *("--rate-scale", str(options.rate_scale), "--length-scale", str(options.length_scale)),
    ]


def newest_costs(log: Path) -> CostRecord:
    """The last costs that the cell wrote down: fitted to all that it had served by then."""
    lines = [decode(line) for line in log.read_bytes().splitlines()]
    return [line for line in lines if isinstance(line, CostRecord)][-1]


def simulate(
    records: Sequence[dict[str, Any]], seen: CostRecord, name: str, *, is_adaptive: bool
) -> Run:
    """Give a simulated cell the requests that were sent, when they were."""
    costs, settings = costs_of(seen), settings_of(seen, {})
    space = LayoutSpace(seen.world, seen.modes)
    layout = parse_layout(name, seen.world, tuple(seen.modes))
    cell = SimCell(layout, costs, settings, space if is_adaptive else None)
    arrivals = sorted(
        (
            Arrival(each["sent_s"], _tier(each), each["prompt_tokens"], each["output_tokens"])
            for each in records
        ),
        key=lambda arrival: arrival.at_s,
    )
    return cell.run(arrivals, arrivals[-1].at_s + TAIL_S)


def _tier(record: dict[str, Any]) -> Tier:
    return tier_of(record["tier"])


def tier_of(name: str | None) -> Tier:
    """The tier of a request that the load generator sends with this one, or with none."""
    return Tier[(name or "standard").upper()]


def seen_of(record: dict[str, Any]) -> RequestTimes:
    """What a real client saw, in the simulator's words."""
    times = record["chunk_times_s"]
    return RequestTimes(
        _tier(record), record["sent_s"], times[0], times[-1], record["output_tokens"]
    )


def outcome_of(seen: Sequence[RequestTimes], costs: CostRecord, switches: int) -> Outcome:
    """Fold requests into what is compared."""
    settings = settings_of(costs, {})
    ended = [each for each in seen if each.end_s is not None]
    ttft = [1e3 * each.ttft_s for each in ended if each.ttft_s is not None]
    tpot = [1e3 * each.tpot_s for each in ended if each.tpot_s is not None and each.output > 1]
    span_s = max(each.end_s or 0.0 for each in ended) - min(each.arrive_s for each in ended)
    return Outcome(
        requests=len(ended),
        ttft_p50_ms=statistics.median(ttft),
        ttft_p90_ms=statistics.quantiles(ttft, n=10)[-1],
        tpot_p50_ms=statistics.median(tpot),
        tpot_p90_ms=statistics.quantiles(tpot, n=10)[-1],
        tokens_per_s=sum(each.output for each in ended) / span_s,
        good=sum(is_good(each, settings) for each in ended),
        switches=switches,
    )


METRICS = (
    ("TTFT p50 ms", "ttft_p50_ms"),
    ("TTFT p90 ms", "ttft_p90_ms"),
    ("TPOT p50 ms", "tpot_p50_ms"),
    ("TPOT p90 ms", "tpot_p90_ms"),
    ("tokens/s", "tokens_per_s"),
    ("within goals", "good"),
)


def table(found: Sequence[Compared]) -> list[str]:
    """Markdown rows: real, simulated, and the second as a part of the first."""
    rows = ["| layout | metric | real | simulated | simulated / real |", "|---|---|---|---|---|"]
    for each in found:
        for metric, field in METRICS:
            real, simulated = getattr(each.real, field), getattr(each.simulated, field)
            ratio = f"{simulated / real:.2f}" if real else "-"
            rows.append(f"| {each.name} | {metric} | {real:.1f} | {simulated:.1f} | {ratio} |")
        counts = each.real.switches, each.simulated.switches
        rows.append(f"| {each.name} | switches | {counts[0]} | {counts[1]} | |")
    return rows


def write(found: Sequence[Compared], options: argparse.Namespace) -> None:
    """Leave the result where benchmarks are kept, and print it."""
    hardware = cores_and_processor() if options.device == "cpu" else "GPUs"
    text = [
        f"# The simulated cell against a real one, {today()}",
        "",
        f"Command: `python -m tests.bench.simulated_run {' '.join(sys.argv[1:])}`, commit "
        f"{commit()}, {options.ranks} ranks on {hardware}.",
        f"Preset `{options.preset}`, {options.duration:g} s, rates x {options.rate_scale:g}, "
        f"lengths x {options.length_scale:g}; {found[0].real.requests} requests. The simulated "
        "cell has the costs that the real one fitted while it served, and no HTTP in front.",
        "",
        *table(found),
    ]
    name = options.out / f"{today()}-{options.device}-simulated-cell"
    name.with_suffix(".md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
