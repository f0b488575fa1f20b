"""The simulated cell against servers that were measured on GPUs: the same requests, offline.

Takes a landed report of `gpu_policy` (what clients saw of each server) and one of `gpu` (what steps
took there), rebuilds the plan that the clients carried out, and gives it to the simulated cell with
costs fitted to those steps. The error is stated, not judged. No GPU is needed:
`python -m tests.bench.simulated_gpu POLICY.json STEPS.json [--preset bursty] [--out DIR]`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comm_pool.layout import parse_layout
from coordinator.model.cost_model import CostModel, GroupCost, SwitchCost
from coordinator.model.policy_settings import PolicySettings
from coordinator.model.step_line import StepLine, fit, sums_of
from loadgen.config import parse_run
from loadgen.options import build_parser
from loadgen.report.stats import summarise
from loadgen.runner import planned_run
from loadgen.workload.load import OpenLoad
from loadgen.workload.plan import PlannedRequest
from tests.bench.simulated_run import TAIL_S, tier_of
from tests.harness.cells.servers import ROOT
from tests.harness.runs.provenance import commit, today
from tools.simulator.cell import Arrival, RequestTimes, SimCell, is_good

PROMPT_TOKENS_MAX = 8_192
"""Longer prompts take several steps, whose times were not measured one by one."""

SETTINGS = PolicySettings()

LAYOUTS = {"static dp2": "dp2", "static tp2": "tp2", "aileron": "shift2"}
"""Server -> the layout that served all of its load; aileron's report tells of no switch."""

MEASURES = ("ttft p50", "ttft p90", "tpot p50", "tpot p90")


@dataclass(frozen=True, slots=True)
class Slice:
    """What the requests of one phase, or all, saw: milliseconds, and the part within its goals."""

    requests: int
    good: float
    times_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Compared:
    """One phase of one server, real and simulated."""

    server: str
    phase: str
    real: Slice
    simulated: Slice


def main() -> None:
    """Simulate what was served, print, and leave a dated table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", type=Path, help="a report of tests.bench.gpu_policy")
    parser.add_argument("steps", type=Path, help="a report of tests.bench.gpu, same shape")
    parser.add_argument("--preset", default="bursty")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    options = parser.parse_args()
    policy, steps = (json.loads(path.read_text()) for path in (options.policy, options.steps))
    if policy["shape"] != steps["shape"]:
        raise SystemExit(f"{options.steps} is of {steps['shape']}, not of {policy['shape']}.")
    found = [
        each
        for server in LAYOUTS
        if options.preset in policy["servers"].get(server, {})
        for each in compare(server, policy["servers"][server][options.preset], steps)
    ]
    write(found, options, policy)


def compare(server: str, report: Mapping[str, Any], steps: Mapping[str, Any]) -> list[Compared]:
    """Serve the report's plan in the simulated cell; one row per phase, and one for all."""
    layout = parse_layout(LAYOUTS[server], int(steps["ranks"]), (1, int(steps["ranks"])))
    cell = SimCell(layout, costs_of(server, steps), SETTINGS)
    plan = plan_of(report)
    run = cell.run([_arrival(each) for each in plan], (plan[-1].at_s or 0.0) + TAIL_S)
    rows = []
    for phase in report["phases"]:
        if phase["requests"]["ok"]:
            inside = [x for x in run.requests if phase["start_s"] <= x.arrive_s < phase["end_s"]]
            rows.append(Compared(server, phase["name"], _real(phase), _simulated(inside)))
    return [*rows, Compared(server, "all", _real(report["total"]), _simulated(run.requests))]


def plan_of(report: Mapping[str, Any]) -> Sequence[PlannedRequest]:
    """The requests that a report is about, from its command; its digest says that they are they."""
    config = parse_run(build_parser().parse_args(report["command"][3:]))
    if not isinstance(config.load, OpenLoad):
        raise SystemExit("Only reports of loads with arrival times can be simulated.")
    plan, digest = planned_run(config, "simulated")
    if digest != report["plan"]["digest"]:
        raise SystemExit("This load generator plans other requests than the report's did.")
    return plan


def costs_of(server: str, steps: Mapping[str, Any]) -> CostModel:
    """What steps of the server's groups take, fitted to what was measured on that box."""
    servers = steps["servers"]
    lines = {}
    if server == "aileron":
        tp, sp = (_line(servers[f"aileron {mode}"], steps) for mode in ("tp2", "sp2"))
        lines["shift2"] = tp, sp, servers["aileron tp2"]["kv_tokens"]
    else:
        line = _line(servers[server], steps)
        name = "dp1" if "dp" in server else server.rsplit(maxsplit=1)[-1]
        lines[name] = line, line, servers[server]["kv_tokens"]
    tasks, chunk = (steps["engine"][key] for key in ("max_num_seqs", "max_num_batched_tokens"))
    groups = {
        name: GroupCost(decode, prefill, room, tasks, chunk)
        for name, (decode, prefill, room) in lines.items()
    }
    return CostModel(groups, SwitchCost(kv_bytes_per_token=steps["kv_bytes_per_token"]))


def _line(server: Mapping[str, Any], steps: Mapping[str, Any]) -> StepLine:
    plan = steps["plan"]
    points: list[tuple[float, float, float]] = []
    for name, each in server["tpot"].items():
        streams = each["streams"][0]
        # A stream has its prompt, and on the average half of what it generates.
        context = streams * (plan["tpot"][name] + plan["tpot_tokens"] / 2)
        points.append((streams, context, each["median_ms"] / 1e3))
    for name, each in server["ttft"].items():
        tokens = int(name)
        if min(plan["tpot"].values()) <= tokens <= PROMPT_TOKENS_MAX:
            points.append((tokens, tokens / 2, each["median_ms"] / 1e3))
    line = fit(sums_of(points))
    assert line is not None
    return line


def _arrival(planned: PlannedRequest) -> Arrival:
    at_s, tier = planned.at_s or 0.0, tier_of(planned.tier)
    return Arrival(at_s, tier, planned.input_tokens, planned.output_tokens)


def _real(part: Mapping[str, Any]) -> Slice:
    return Slice(part["requests"]["ok"], part["goodput"]["good_share"], _times(part))


def _times(summaries: Mapping[str, Any]) -> dict[str, float]:
    return {f"{kind} {q}": summaries[f"{kind}_ms"][q] for kind, q in map(str.split, MEASURES)}


def _simulated(seen: Sequence[RequestTimes]) -> Slice:
    ended = [each for each in seen if each.end_s is not None]
    summaries = {
        "ttft_ms": summarise([1e3 * (each.ttft_s or 0.0) for each in ended]),
        "tpot_ms": summarise([1e3 * (each.tpot_s or 0.0) for each in ended]),
    }
    good = sum(is_good(each, SETTINGS) for each in seen)
    return Slice(len(ended), good / len(seen), _times(summaries))


def table(found: Sequence[Compared]) -> list[str]:
    """Markdown rows: real, and behind it simulated."""
    head = ["server", "phase", "requests", *(f"{name} ms" for name in MEASURES), "good"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for each in found:
        real, simulated = each.real, each.simulated
        cells = [f"{real.times_ms[name]:.0f} / {simulated.times_ms[name]:.0f}" for name in MEASURES]
        good = f"{real.good:.2f} / {simulated.good:.2f}"
        rows.append(
            f"| {each.server} | {each.phase} | {real.requests} | {' | '.join(cells)} | {good} |"
        )
    return rows


def write(
    found: Sequence[Compared], options: argparse.Namespace, policy: Mapping[str, Any]
) -> None:
    """Leave the table where benchmarks are kept, and print it."""
    text = [
        f"# The simulated cell against servers on GPUs, {today()}",
        "",
        f"Command: `python -m tests.bench.simulated_gpu {' '.join(sys.argv[1:])}`, commit "
        f"{commit()}. Measured on {policy['hardware']}, {policy['shape']} shape, preset "
        f"`{options.preset}`. Each cell: measured / simulated.",
        "",
        *table(found),
    ]
    name = options.out / f"{today()}-simulated-gpu-cell.md"
    name.write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
