"""Several runs side by side: the same numbers of each, in total, by tier and by phase. Pure.

Slices are matched by name; a run that lacks one has dashes there. `compare` gives every metric of
two runs and their ratios; this module gives the most important ones for any number of runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.report.compare import Better

PEAK_WINDOW_S = 5.0
"""Peak throughput is the best mean over this time, so that one lucky second does not count."""

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One number of a slice: its heading, its key in JSON, its place, and the better direction."""

    heading: str
    key: str
    path: tuple[str, str]
    better: Better


@dataclass(frozen=True, slots=True)
class Line:
    """One run's numbers in one slice, in the order of `COLUMNS`; None if not measured."""

    run: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One slice, by name, with a line for every run."""

    name: str
    lines: tuple[Line, ...]


COLUMNS = (
    Column("requests", "scheduled", ("requests", "scheduled"), Better.NEITHER),
    Column("failed", "failed", ("requests", "failed"), Better.LOWER),
    Column("tok/s", "output_tokens_per_s", ("throughput", "output_tokens_per_s"), Better.HIGHER),
    Column("peak\ntok/s", "peak_tokens_per_s", ("throughput", "peak"), Better.HIGHER),
    *(
        Column(f"{name}\n{level}", f"{group[:-3]}_{level}_ms", (group, level), Better.LOWER)
        for name, group in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
        for level in ("p50", "p90", "p99")
    ),
    Column("good", "good_share", ("goodput", "good_share"), Better.HIGHER),
    Column("good/s", "good_per_s", ("goodput", "good_per_s"), Better.HIGHER),
)


def side_by_side(reports: Sequence[Report], names: Sequence[str]) -> tuple[Section, ...]:
    """Return the total, then tiers, phases and their tiers, if there is more than one."""
    slices = [_slices(report) for report in reports]
    order = dict.fromkeys(name for found in slices for name in found)
    return tuple(
        Section(
            name,
            tuple(
                Line(run, _values(found.get(name)))
                for run, found in zip(names, slices, strict=True)
            ),
        )
        for name in order
    )


def best_of(section: Section) -> tuple[float | None, ...]:
    """Return each column's best value, None if no direction is better or all are equal."""
    found = []
    for column, values in zip(
        COLUMNS, zip(*(line.values for line in section.lines), strict=True), strict=True
    ):
        present = [value for value in values if value is not None]
        decides = column.better is not Better.NEITHER and len(set(present)) > 1
        pick = max if column.better is Better.HIGHER else min
        found.append(pick(present) if decides else None)
    return tuple(found)


def differences(reports: Sequence[Report], names: Sequence[str]) -> list[str]:
    """Return a sentence for each way in which the runs differ in load, limits or client lag."""
    sentences = []
    first = reports[0]
    for report, name in zip(reports[1:], names[1:], strict=True):
        if report["plan"]["digest"] != first["plan"]["digest"]:
            sentences.append(f"{name} was not sent the same requests as {names[0]}.")
        if report["slos"] != first["slos"]:
            sentences.append(f"{name} has other limits for goodput than {names[0]}.")
    sentences += [
        f"{name}: {sentence}"
        for report, name in zip(reports, names, strict=True)
        for sentence in report["generator"]["fell_behind"]
    ]
    return sentences


def switch_lines(reports: Sequence[Report], names: Sequence[str]) -> list[str]:
    """Return one line for each watched run, with its server's switches and their times."""
    lines = []
    for report, name in zip(reports, names, strict=True):
        watched = report["switches"]
        if watched is None:
            continue
        events = [f"{each['to']} at {each['at_s']:.1f} s" for each in watched["events"]]
        events_text = ", then ".join(events) if events else "no switch"
        lines.append(f"{name}: {watched['layout_at_start']} at the start, {events_text}.")
    return lines


def as_rows(sections: Sequence[Section]) -> list[dict[str, object]]:
    """Return the sections for machines: one object for each slice and run."""
    return [
        {"slice": section.name, "run": line.run}
        | dict(zip((column.key for column in COLUMNS), line.values, strict=True))
        for section in sections
        for line in section.lines
    ]


def peak_tokens_per_s(report: Report, start_s: float, end_s: float) -> float | None:
    """Return the best mean over `PEAK_WINDOW_S` of whole seconds in [start_s, end_s), or None."""
    series = report["series"]
    interval_s = series["interval_s"]
    inside = [
        tokens
        for at_s, tokens in zip(series["t_s"], series["tokens"], strict=True)
        if at_s >= start_s and at_s + interval_s <= math.ceil(end_s)
    ]
    width = min(len(inside), round(PEAK_WINDOW_S / interval_s))
    if not width:
        return None
    sums = [sum(inside[first : first + width]) for first in range(len(inside) - width + 1)]
    return float(max(sums) / (width * interval_s))


def _slices(report: Report) -> dict[str, dict[str, Any]]:
    found = {"total": _with_peak(report, report["total"], 0.0, report["duration_s"])}
    tiers = report["tiers"] if len(report["tiers"]) > 1 else {}
    phases = report["phases"] if len(report["phases"]) > 1 else []
    found |= {f"tier {tier}": part for tier, part in tiers.items()}
    for phase in phases:
        name = f"phase {phase['name']}"
        found[name] = _with_peak(report, phase, phase["start_s"], phase["end_s"])
        found |= {f"{name}, tier {tier}": phase["tiers"][tier] for tier in tiers}
    return found


def _with_peak(
    report: Report, part: Mapping[str, Any], start_s: float, end_s: float
) -> dict[str, Any]:
    peak = peak_tokens_per_s(report, start_s, end_s)
    return {**part, "throughput": {**part["throughput"], "peak": peak}}


def _values(part: Mapping[str, Any] | None) -> tuple[float | None, ...]:
    if part is None:
        return (None,) * len(COLUMNS)
    return tuple(part[column.path[0]].get(column.path[1]) for column in COLUMNS)
