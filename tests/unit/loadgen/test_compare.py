"""Comparing two reports: ratios, scopes, thresholds, and what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.errors import UsageError
from loadgen.report.compare import all_metrics, as_json, compare, parse_threshold
from loadgen.report.files import WHOLE_REPORT, read_report
from loadgen.report.records import Answer, RequestRecord
from loadgen.report.report import SCHEMA, SCHEMA_VERSION, Finished, build_report
from loadgen.report.slo import ALL_TIERS, Slo, Slos
from loadgen.report.tables import comparison_table, number
from loadgen.workload.arrivals import Phase
from loadgen.workload.plan import PlannedRequest


def report(*, slower: float = 1.0) -> dict[str, Any]:
    """Ten requests of two tiers, with latencies `slower` times the base."""
    records = []
    for index in range(10):
        planned = PlannedRequest(
            index, f"r{index}", 0.1 * index, 0, ("a", "b")[index % 2], 5, 3, None, 0
        )
        times_s = tuple(0.1 * index + slower * 0.1 * count for count in (1, 2, 3))
        answer = Answer(times_s, times_s[-1], "stop", saw_done=True)
        records.append(RequestRecord(planned, 0.1 * index, times_s[-1], None, answer, None))
    run = Finished(tuple(records), (Phase("steady", 10, 1.0),), 10, 2.0, interrupted=False)
    return build_report(run, Slos({ALL_TIERS: Slo(150, None)}), keep_records=False)


def broken(
    *texts: str, first: dict[str, Any] | None = None, slower: float = 1.1
) -> tuple[str, ...]:
    thresholds = [parse_threshold(text) for text in texts]
    return compare(first or report(), report(slower=slower), thresholds=thresholds).broken


def test_a_report_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    named = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
    whole = {**dict.fromkeys(WHOLE_REPORT), **named, **json.loads(json.dumps(report()))}
    path.write_text(json.dumps(whole), encoding="utf-8-sig")
    assert read_report(path) == whole


def test_every_metric_exists_in_a_report() -> None:
    total = report()["total"]
    for metric in all_metrics():
        assert metric.path[1] in total[metric.path[0]], metric.name


def test_ratios_are_second_over_first() -> None:
    rows = {row.metric: row for row in compare(report(), report(slower=1.5)).rows}
    assert rows["ttft_p50_ms"].ratio == pytest.approx(1.5, rel=0.01)
    assert rows["ttft_p50_ms"].second_is_better is False
    assert compare(report(slower=1.5), report()).rows[2].second_is_better is True
    assert rows["failed"].ratio == 1.0  # both 0
    assert rows["failed"].second_is_better is None
    assert rows["sent"].second_is_better is None


def test_thresholds_on_the_ratio() -> None:
    assert broken("ttft_p50_ms>1.05") == ("ttft_p50_ms>1.05: it is 1.1",)
    assert broken("ttft_p50_ms>1.2", "requests_per_s<0.5", "ok<1") == ()
    assert broken("ttft_p50_ms >= 1.0", slower=1.0) == ("ttft_p50_ms >= 1.0: it is 1",)


def test_thresholds_on_the_second_report_itself() -> None:
    assert broken("b.failed>0") == ()
    assert broken("b.ttft_p50_ms>100") == ("b.ttft_p50_ms>100: it is 110",)
    assert broken("b.ok<=10") != ()


def test_from_nothing_to_something_breaks_any_upper_limit() -> None:
    first, second = report(), report()
    second["total"]["errors"]["silent_truncation"] = 1
    threshold = parse_threshold("silent_truncation>1000")
    assert compare(first, second, thresholds=[threshold]).broken
    row = next(r for r in compare(first, second).rows if r.metric == "silent_truncation")
    assert row.ratio is None


def test_a_threshold_on_what_was_not_measured_is_broken() -> None:
    first = report()
    first["total"]["ttft_ms"]["p50"] = None
    assert broken("ttft_p50_ms>9", first=first) == ("ttft_p50_ms>9: ttft_p50_ms was not measured",)
    assert broken("b.ttft_p50_ms>999", first=first) == ()


@pytest.mark.parametrize(
    "text",
    ["", "ttft_p50_ms", "ttft_p50_ms>", "ttft_p50_ms>x", "ttft_p50_ms=1", "a.ok>1", "ok>1>2"],
)
def test_unreadable_thresholds_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="does not look like"):
        parse_threshold(text)


def test_an_unknown_metric_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"known are .*ttft_p50_ms"):
        parse_threshold("latency>1")


def test_scopes() -> None:
    first, second = report(), copy.deepcopy(report())
    second["tiers"]["a"]["ttft_ms"]["p50"] = 900.0
    rows = {row.metric: row for row in compare(first, second, scope="tier:a").rows}
    assert rows["ttft_p50_ms"].second == 900.0
    rows = {row.metric: row for row in compare(first, second, scope="phase:steady").rows}
    assert rows["ttft_p50_ms"].ratio == 1.0


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        ("tier:c", "it has a, b"),
        ("phase:x", "it has steady"),
        ("tier", "is not total"),
        ("all", "is not total"),
        ("total:x", "is not total"),
    ],
)
def test_unknown_scopes_are_refused(scope: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        compare(report(), report(), scope=scope)


def test_json_has_every_metric_and_no_infinity() -> None:
    second = report()
    second["total"]["errors"]["timeout"] = 2
    said = as_json(compare(report(), second), ("static", "aileron"))
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert said["names"] == ["static", "aileron"]


def test_the_table_leaves_out_what_neither_run_had() -> None:
    comparison = compare(report(), report(slower=2))
    table = comparison_table(comparison, ("static", "aileron"))
    seen = [row.metric for row in comparison.rows if row.first or row.second]
    assert table.row_count == len(seen) + 1 > 20
    assert "failed" not in seen


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (3, "3"), (3.0, "3"), (1.2345, "1.234"), (123.44, "123.4"), (9876.5, "9876")],
)
def test_numbers_are_short(value: float | None, shown: str) -> None:
    assert number(value) == shown
