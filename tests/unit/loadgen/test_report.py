"""The report's numbers, from records whose times are known."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.client.overhead import Overhead, overload_warnings
from loadgen.report.advice import warnings_for
from loadgen.report.records import Answer, FailureKind, RequestRecord
from loadgen.report.report import Finished, build_report
from loadgen.report.series import build_series
from loadgen.report.slo import ALL_TIERS, NO_SLO, Slo, Slos, is_good, parse_slos
from loadgen.report.tables import turns_table
from loadgen.workload.arrivals import Phase
from loadgen.workload.plan import PlannedRequest

MakePlanned = Callable[..., PlannedRequest]
MakeRecord = Callable[..., RequestRecord]
PHASES = (Phase("low", 1, 2.0), Phase("high", 4, 2.0))


def report_of(
    *records: RequestRecord,
    slo: Slo = NO_SLO,
    phases: tuple[Phase, ...] = PHASES,
    duration_s: float = 5.0,
    keep_records: bool = False,
) -> dict[str, Any]:
    run = Finished(records, phases, len(records) + 1, duration_s, interrupted=False)
    return build_report(run, Slos({ALL_TIERS: slo}), keep_records=keep_records)


def test_latencies_of_one_request(make_record: MakeRecord) -> None:
    record = make_record(sent_s=1.0, chunk_times_s=(1.1, 1.2, 1.5), ended_s=1.6)
    total = report_of(record)["total"]
    assert total["ttft_ms"]["p50"] == pytest.approx(100)
    assert total["tpot_ms"]["p50"] == pytest.approx(200)
    assert total["chunk_gap_ms"]["count"] == 2
    assert total["chunk_gap_ms"]["max"] == pytest.approx(300)
    assert total["max_chunk_gap_ms"]["p50"] == pytest.approx(300)
    assert total["e2e_ms"]["p50"] == pytest.approx(600)


def test_usage_is_preferred_to_counting_events(make_record: MakeRecord) -> None:
    record = make_record(chunk_times_s=(0.1, 0.5), usage=5)
    total = report_of(record, duration_s=1.0)["total"]
    assert total["tokens"]["output"] == 5
    assert total["tpot_ms"]["p50"] == pytest.approx(100)  # 400 ms for the 4 after the first
    assert total["throughput"]["output_tokens_per_s"] == 5
    assert total["requests"]["without_usage"] == 0
    assert report_of(make_record())["total"]["requests"]["without_usage"] == 1


def test_every_failure_is_counted_under_its_name(make_record: MakeRecord) -> None:
    failed = [make_record(failure=kind) for kind in FailureKind]
    total = report_of(make_record(), *failed)["total"]
    assert total["errors"] == dict.fromkeys((kind.value for kind in FailureKind), 1)
    requests = total["requests"]
    assert requests["scheduled"] == requests["ok"] + requests["failed"] + 2
    assert (requests["cancelled"], requests["dropped_by_client"]) == (1, 1)
    assert total["error_codes"]["refused:code"] == 1


def test_failed_requests_do_not_enter_latencies_or_throughput(make_record: MakeRecord) -> None:
    slow = make_record(sent_s=0.0, chunk_times_s=(4.0,), failure=FailureKind.TIMEOUT)
    total = report_of(make_record(), slow)["total"]
    assert total["ttft_ms"] == report_of(make_record())["total"]["ttft_ms"]
    assert total["throughput"]["output_tokens_per_s"] == pytest.approx(3 / 5)


def test_phases_count_latency_by_send_and_throughput_by_delivery(
    make_planned: MakePlanned, make_record: MakeRecord
) -> None:
    # Sent in the first phase, delivered half in the second.
    record = make_record(
        make_planned(at_s=1.0, phase_index=0), sent_s=1.0, chunk_times_s=(1.5, 1.9, 2.5, 3.0)
    )
    low, high = report_of(record)["phases"]
    assert (low["requests"]["sent"], high["requests"]["sent"]) == (1, 0)
    assert low["ttft_ms"]["p50"] == pytest.approx(500)
    assert high["ttft_ms"]["p50"] is None
    assert low["throughput"]["output_tokens_per_s"] == pytest.approx(1)
    assert high["throughput"]["output_tokens_per_s"] == pytest.approx(1)
    assert (low["throughput"]["requests_per_s"], high["throughput"]["requests_per_s"]) == (0, 0.5)


def test_tiers_are_slices_of_the_total_and_of_each_phase(
    make_planned: MakePlanned, make_record: MakeRecord
) -> None:
    records = [
        make_record(make_planned(index, tier=tier, phase_index=index % 2), sent_s=0.05 * index)
        for index, tier in enumerate(["batch", "batch", "interactive"])
    ]
    report = report_of(*records)
    assert list(report["tiers"]) == ["batch", "interactive"]
    assert report["tiers"]["batch"]["requests"]["sent"] == 2
    assert report["phases"][0]["tiers"]["batch"]["requests"]["sent"] == 1
    assert report["phases"][1]["tiers"]["interactive"]["requests"]["sent"] == 0


def test_goodput_needs_both_limits(make_record: MakeRecord) -> None:
    fast = make_record(sent_s=0.0, chunk_times_s=(0.1, 0.2))
    late = make_record(sent_s=0.0, chunk_times_s=(0.5, 0.6))
    slow = make_record(sent_s=0.0, chunk_times_s=(0.1, 0.9))
    one_token = make_record(sent_s=0.0, chunk_times_s=(0.1,))
    failed = make_record(sent_s=0.0, chunk_times_s=(0.1,), failure=FailureKind.TIMEOUT)
    report = report_of(fast, late, slow, one_token, failed, slo=Slo(200, 150), duration_s=4.0)
    goodput = report["total"]["goodput"]
    assert (goodput["good"], goodput["good_share"], goodput["good_per_s"]) == (2, 0.4, 0.5)
    assert (goodput["slo_ttft_ms"], goodput["slo_tpot_ms"]) == (200, 150)
    assert (
        report_of(fast, late, failed)["total"]["goodput"]["good"] == 2
    )  # no limits: whole is good


def test_scheduling_shows_a_slow_client(make_planned: MakePlanned, make_record: MakeRecord) -> None:
    records = [
        make_record(make_planned(0, at_s=1.0), sent_s=1.05, chunk_times_s=(1.1, 1.2, 1.3)),
        make_record(make_planned(1, at_s=2.0), sent_s=2.001, chunk_times_s=(2.1, 2.2, 2.3)),
    ]
    report = report_of(*records)
    assert report["scheduling"]["lag_ms"]["max"] == pytest.approx(50)
    assert report["scheduling"]["late_sends"] == 1
    assert report["unsent_requests"] == 1
    # The client's own delay is in the latency, and can be told from the server's.
    first, second = records
    assert report["total"]["ttft_ms"]["count"] == 2
    assert report_of(first)["total"]["ttft_ms"]["p50"] == pytest.approx(
        report_of(first)["total"]["ttft_from_send_ms"]["p50"] + 50
    )
    assert report_of(first)["total"]["e2e_ms"]["max"] == pytest.approx(300)
    assert report_of(second)["total"]["lag_ms"]["max"] == pytest.approx(1)


def test_series_columns_have_one_entry_per_second(make_record: MakeRecord) -> None:
    records = [
        make_record(sent_s=0.2, chunk_times_s=(0.5, 0.7, 2.9), ended_s=3.2),
        make_record(sent_s=2.5, chunk_times_s=(2.6,), failure=FailureKind.SILENT_TRUNCATION),
        make_record(
            sent_s=None, chunk_times_s=(), ended_s=1.0, failure=FailureKind.DROPPED_BY_CLIENT
        ),
    ]
    slos = parse_slos("standard:350ms/none")
    series: dict[str, Any] = build_series(records, 3.2, lambda record: is_good(record, slos))
    assert series["good"] == [1, 0, 0, 0]
    assert series["t_s"] == [0, 1, 2, 3]
    assert series["arrivals"] == [1, 0, 1, 0]
    assert series["completions"] == [0, 0, 0, 1]
    assert series["errors"] == [0, 0, 1, 0]
    assert series["dropped_by_client"] == [0, 1, 0, 0]
    assert series["tokens"] == [2, 0, 2, 0]
    assert series["ttft_p50_ms"] == [pytest.approx(300), None, pytest.approx(100), None]
    assert series["chunk_gap_max_ms"] == [pytest.approx(200), None, pytest.approx(2200), None]
    assert series["in_flight"] == [pytest.approx(0.8), 1, pytest.approx(1.1), pytest.approx(1)]


def test_gaps_per_token_need_usage(make_record: MakeRecord) -> None:
    three_chunks = {"chunk_times_s": (1.0, 1.3, 1.9)}
    total = report_of(make_record(**three_chunks, usage=6))["total"]
    assert total["chunk_gap_ms"]["max"] == pytest.approx(600)
    assert total["token_gap_ms"]["max"] == pytest.approx(300)
    assert total["tpot_ms"]["max"] == pytest.approx(180)
    for usage in (None, 0):
        total = report_of(make_record(**three_chunks, usage=usage))["total"]
        assert total["chunk_gap_ms"]["count"] == 2
        assert total["token_gap_ms"]["count"] == 0


@settings(deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.floats(0, 20), st.floats(0, 20)).map(sorted), min_size=1, max_size=20
    )
)
def test_series_lose_nothing(spans: list[list[float]]) -> None:
    planned = PlannedRequest(0, "r", 0.0, 0, None, 1, 1, None, 0)
    records = [
        RequestRecord(planned, start, end, None, Answer(chunk_times_s=(end,)), None)
        for start, end in spans
    ]
    duration_s = max(end for _, end in spans)
    series: dict[str, Any] = build_series(records, duration_s, lambda record: record.ok)
    assert sum(series["arrivals"]) == sum(series["completions"]) == sum(series["tokens"])
    assert len({len(column) for name, column in series.items() if name != "interval_s"}) == 1


def test_a_closed_loop_has_one_phase_without_a_rate(
    make_planned: MakePlanned, make_record: MakeRecord
) -> None:
    report = report_of(make_record(make_planned(at_s=None)), phases=(), duration_s=2.0)
    (phase,) = report["phases"]
    assert (phase["name"], phase["rate_per_s"], phase["end_s"]) == ("closed", None, 2.0)
    assert report["scheduling"]["lag_ms"]["count"] == 0


def test_an_interrupted_run_ends_its_phases_where_it_ended(make_record: MakeRecord) -> None:
    low, high = report_of(make_record(), duration_s=1.0)["phases"]
    assert (low["end_s"], high["start_s"], high["end_s"]) == (1.0, 1.0, 1.0)
    assert high["throughput"]["requests_per_s"] is None


def test_a_report_without_any_request_is_still_whole_json() -> None:
    report = report_of(keep_records=True, slo=Slo(1, 1))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["total"]["ttft_ms"]["p50"] is None


def test_raw_records_are_kept_only_when_asked(make_record: MakeRecord) -> None:
    assert "records" not in report_of(make_record())
    (record,) = report_of(make_record(), keep_records=True)["records"]
    assert record["chunk_times_s"] == [0.1, 0.2, 0.3]
    assert record["error"] is None
    json.dumps(record, allow_nan=False)


def test_warnings_name_what_to_doubt(make_planned: MakePlanned, make_record: MakeRecord) -> None:
    planned = make_planned(tier="interactive", prompt_tokens=10, output_tokens=3)
    records = [
        make_record(planned, usage=2, prompt_usage=20, saw_done=False, served_tier="batch"),
        make_record(planned, prompt_usage=20),
        make_record(planned, sent_s=None, chunk_times_s=(), failure=FailureKind.DROPPED_BY_CLIENT),
    ]
    told = " ".join(warnings_for(records, ignore_eos=True))
    for part in (
        "--max-in-flight",
        "no usage",
        "without [DONE]",
        "1 answers did not have the length",
        "2.00 prompt tokens",
        "another tier",
    ):
        assert part in told


def test_each_tier_has_its_own_limits(make_planned: MakePlanned, make_record: MakeRecord) -> None:
    records = [
        make_record(make_planned(tier=tier), chunk_times_s=(first_s, first_s + 0.08))
        for tier in ("interactive", "standard", "batch", "other", None)
        for first_s in (0.4, 1.0, 9.0)
    ]
    run = Finished(tuple(records), PHASES, len(records), 10.0, interrupted=False)
    report: Any = build_report(run, parse_slos(""), keep_records=False)
    good = {tier: part["goodput"]["good"] for tier, part in report["tiers"].items()}
    # 80 ms a token is too slow for interactive; tiers without limits have those of standard.
    assert good == {"interactive": 0, "standard": 2, "batch": 3, "other": 2}
    assert report["total"]["goodput"]["good"] == 9
    assert report["total"]["goodput"]["slo_ttft_ms"] is None  # not one limit for all
    assert report["tiers"]["interactive"]["goodput"]["slo_ttft_ms"] == 500
    assert report["slos"]["batch"] == {"ttft_ms": None, "tpot_ms": None}


@pytest.mark.parametrize(
    ("late_s", "loop_ms", "cpu", "said"),
    [
        (0.001, 1.0, 0.2, ()),
        (0.3, 1.0, 0.2, ("not keep its schedule",)),
        (0.001, 90.0, 0.2, ("event loop was up to 90 ms late",)),
        (0.3, 90.0, 0.97, ("not keep its schedule", "event loop", "97% of its one core")),
    ],
)
def test_the_client_says_when_it_fell_behind(
    make_planned: MakePlanned,
    make_record: MakeRecord,
    late_s: float,
    loop_ms: float,
    cpu: float,
    said: tuple[str, ...],
) -> None:
    records = [
        make_record(make_planned(index, at_s=index), sent_s=index + late_s) for index in range(50)
    ]
    sentences = overload_warnings(records, Overhead(cpu, [loop_ms] * 20))
    assert len(sentences) == len(said)
    for part, sentence in zip(said, sentences, strict=True):
        assert part in sentence


def test_a_clean_run_has_no_warnings(make_planned: MakePlanned, make_record: MakeRecord) -> None:
    record = make_record(make_planned(tier="batch"), usage=3, prompt_usage=10, served_tier="batch")
    assert warnings_for([record], ignore_eos=True) == []


def test_sessions_are_counted_and_timed_by_turn(
    make_planned: MakePlanned, make_record: MakeRecord
) -> None:
    def turn(session: str, number: int, ttft_s: float, **more: Any) -> RequestRecord:
        planned = replace(make_planned(at_s=1.0), session=session, turn=number)
        return make_record(planned, sent_s=1.0, chunk_times_s=(1.0 + ttft_s,), **more)

    records = (
        turn("a", 0, 0.1, prompt_usage=10),
        turn("a", 1, 0.3, prompt_usage=40),
        turn("b", 0, 0.2, prompt_usage=20),
        turn("b", 1, 0.9, failure=FailureKind.TIMEOUT),
        make_record(make_planned(9)),
    )
    run = Finished(
        records, PHASES, 9, 5.0, interrupted=False, session_turns={"a": 2, "b": 3, "c": 2}
    )
    report: Any = build_report(run, parse_slos(""), keep_records=True)
    sessions = report["sessions"]
    table = turns_table(report)
    assert table is not None
    assert table.title == "1 of 3 sessions finished, by turn"
    assert [list(column.cells)[1] for column in table.columns] == ["2", "2", "40", "300", "300"]
    by_turn = sessions.pop("by_turn")
    assert sessions == {
        "planned": 3, "started": 2, "finished": 1, "cut_short": 1, "turns": 4, "turns_planned": 7,
    }  # fmt: skip
    assert [(each["turn"], each["requests"], each["ok"]) for each in by_turn] == [
        (1, 2, 2),
        (2, 2, 1),
    ]
    assert [each["prompt_tokens_mean"] for each in by_turn] == [15, 40]
    assert [each["ttft_ms"]["p50"] for each in by_turn] == pytest.approx([150, 300])
    assert [record["turn"] for record in report["records"]] == [1, 2, 1, 2, None]
    without = report_of(make_record())
    assert without["sessions"] is None
    assert turns_table(without) is None
    assert any("1 sessions ended early" in each for each in warnings_for(records, ignore_eos=False))
