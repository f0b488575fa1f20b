"""Table, verdicts and pictures of `tests.bench.gpu_policy`, from one result file or several."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.report.overlay import draw_runs
from loadgen.report.sidebyside import (
    COLUMNS,
    differences,
    peak_tokens_per_s,
    side_by_side,
    switch_lines,
)
from tests.bench.gpu_verdict import Verdict, at_least, at_most

OURS = "aileron"
SHOWN = (
    *("failed", "output_tokens_per_s", "peak_tokens_per_s", "ttft_p50_ms", "ttft_p90_ms"),
    *("tpot_p50_ms", "tpot_p90_ms", "good_share"),
)
KEYS = tuple(column.key for column in COLUMNS)
PHASE_MAX, PEAK_MIN, GOODPUT_MIN, LATENCY_MAX = 1.05, 0.97, 1.3, 0.85
PRIORITY_TPOT_MAX, PRIORITY_TTFT_MAX, PRIORITY_PEAK_MIN = 1.1, 1.2, 0.95

Reports = Mapping[str, Mapping[str, Any]]
"""Of one preset, by server."""


def write_policy_report(parts: Sequence[dict[str, Any]], folder: Path) -> None:
    """Leave JSON, a table and a picture for each preset in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {**parts[0], "command": "; ".join(part["command"] for part in parts)}
    for field in ("servers", "errors"):
        results[field] = {name: each for part in parts for name, each in part[field].items()}
    stem = f"{results['date']}-gpu-policy-{results['shape']}-{results['ranks']}"
    (folder / f"{stem}.json").write_text(json.dumps(results))
    presets = dict.fromkeys(preset for each in results["servers"].values() for preset in each)
    text = [
        f"# The adaptive policy against static vLLM over HTTP, {results['shape']} shape, "
        f"{results['date']}",
        "",
        f"Command: `{results['command']}`, commit {results['commit']}, {results['hardware']}; "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + ". The same requests at the same times for every server, one server after the other.",
    ]
    for preset in presets:
        reports = {
            name: each[preset] for name, each in results["servers"].items() if preset in each
        }
        text += ["", f"## {preset}", "", *section_of(preset, reports, int(results["ranks"]))]
        picture = draw_runs(list(reports.values()), list(reports), "svg")
        (folder / f"{stem}-{preset}.svg").write_bytes(picture)
        text += ["", f"![{preset}]({stem}-{preset}.svg)"]
    for name, error in results["errors"].items():
        text += ["", f"{name} failed: {error.splitlines()[0] if error else ''}"]
    (folder / f"{stem}.md").write_text("\n".join(text) + "\n")


def section_of(preset: str, reports: Reports, ranks: int) -> list[str]:
    """Return the lines about one preset: goals, verdicts, a table, and what the policy changed."""
    first = next(iter(reports.values()))
    goals = ", ".join(
        f"{tier} {limits['ttft_ms']}/{limits['tpot_ms']}" for tier, limits in first["slos"].items()
    )
    rows = [f"Goals for TTFT/TPOT in ms by tier: {goals}.", ""]
    rows += ["| target | measured | |", "|---|---|---|"]
    judged = priority_verdicts if preset == "priority" else bursty_verdicts
    rows += [
        f"| {each.target} | {each.measured} | {each.word} |" for each in judged(reports, ranks)
    ]
    columns = [column for column in COLUMNS if column.key in SHOWN]
    heads = " | ".join(column.heading.replace("\n", " ") for column in columns)
    rows += ["", f"| slice | server | {heads} |", "|---|---|" + "---|" * len(columns)]
    seen: dict[str, list[tuple[float | None, ...]]] = {}
    for section in side_by_side(list(reports.values()), list(reports)):
        lines = [dict(zip(KEYS, line.values, strict=True)) for line in section.lines]
        seen[section.name] = [(each["ttft_p50_ms"], each["good_share"]) for each in lines]
        whole = seen.get(section.name.split(", tier")[0])
        is_whole = ", tier" in section.name and seen[section.name] == whole
        if is_whole or all(each["ttft_p50_ms"] is None for each in lines):
            continue  # A tier without requests in that phase, or the only one that has any.
        for line, values in zip(section.lines, lines, strict=True):
            cells = " | ".join(_cell(values[column.key]) for column in columns)
            rows.append(f"| {section.name} | {line.run} | {cells} |")
    said = switch_lines(list(reports.values()), list(reports))
    said += differences(list(reports.values()), list(reports))
    reasons = [
        f"- {each['choice']}: {each['reason']}."
        for each in reports.get(OURS, {}).get("decisions", ())
        if each["changes"]
    ]
    if reasons:
        said += ["", "What the policy changed, in order:", "", *reasons]
    return [*rows, "", *said]


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _static(reports: Reports) -> list[Mapping[str, Any]]:
    return [report for name, report in reports.items() if name != OURS]


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _peak(report: Mapping[str, Any] | None) -> float | None:
    return None if report is None else peak_tokens_per_s(report, 0.0, report["duration_s"])


def latency_in_goals(report: Mapping[str, Any]) -> float | None:
    """Mean over requests of ½(TTFT/goal + TPOT/goal), of the tiers that have goals; None if none.

    The mean of a sum is the sum of the means, which the report has by tier.
    """
    total = count = 0.0
    for tier, of_tier in report["tiers"].items():
        goals = report["slos"][tier]
        parts = [
            of_tier[name]["mean"] / goals[name]
            for name in ("ttft_ms", "tpot_ms")
            if goals[name] is not None and of_tier[name]["mean"] is not None
        ]
        if parts:
            number = of_tier["ttft_ms"]["count"]
            total += number * sum(parts) / len(parts)
            count += number
    return total / count if count else None


def bursty_verdicts(reports: Reports, ranks: int) -> list[Verdict]:
    """TTFT and TPOT of each phase, peak throughput, latency in goals and goodput.

    Each against the better one of all static servers, those with vLLM's defaults included.
    """
    ours, static = reports.get(OURS), _static(reports)
    if ours is None or not static:
        return []
    found = []
    for index, phase in enumerate(ours["phases"]):
        for metric, at in (("ttft_ms", "p90"), ("tpot_ms", "p50")):
            times = [each["phases"][index][metric][at] for each in static]
            best = min((each for each in times if each is not None), default=None)
            name = f"{metric[:4].upper()} {at} of {phase['name']}: at most {PHASE_MAX} x the best's"
            found.append(at_most(name, _over(phase[metric][at], best), PHASE_MAX))
    peaks = [peak for each in static if (peak := _peak(each)) is not None]
    peak = _over(_peak(ours), max(peaks, default=None))
    found.append(at_least(f"peak throughput: at least {PEAK_MIN} x the best's", peak, PEAK_MIN))
    latencies = [each for report in static if (each := latency_in_goals(report)) is not None]
    latency = _over(latency_in_goals(ours), min(latencies, default=None))
    name = f"mean latency in units of the goals: at most {LATENCY_MAX} x the best's"
    found.append(at_most(name, latency, LATENCY_MAX))
    best_good = max(each["total"]["goodput"]["good"] for each in static)
    good = _over(ours["total"]["goodput"]["good"], best_good)
    name = f"goodput: at least {GOODPUT_MIN} x the best static's"
    return [*found, at_least(name, good, GOODPUT_MIN)]


def priority_verdicts(reports: Reports, ranks: int) -> list[Verdict]:
    """Of priority requests against the wide engine's, and throughput against dp's."""
    ours = reports.get(OURS)
    dp, tp = reports.get(f"static dp{ranks}"), reports.get(f"static tp{ranks}")
    if ours is None:
        return []
    high = "interactive"
    mine, theirs = ours["tiers"][high], tp["tiers"][high] if tp is not None else None

    def against_tp(metric: str) -> float | None:
        return None if theirs is None else _over(mine[metric]["p50"], theirs[metric]["p50"])

    name = f"of {high} requests: at most"
    return [
        at_most(
            f"TPOT p50 {name} {PRIORITY_TPOT_MAX} x tp{ranks}'s",
            against_tp("tpot_ms"),
            PRIORITY_TPOT_MAX,
        ),
        at_most(
            f"TTFT p50 {name} {PRIORITY_TTFT_MAX} x tp{ranks}'s",
            against_tp("ttft_ms"),
            PRIORITY_TTFT_MAX,
        ),
        at_least(
            f"peak throughput: at least {PRIORITY_PEAK_MIN} x dp{ranks}'s",
            _over(_peak(ours), _peak(dp)),
            PRIORITY_PEAK_MIN,
        ),
    ]
