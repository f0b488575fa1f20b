"""Traces from files: what is read of the two formats, and one sentence for everything hostile."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.cli import main
from loadgen.errors import UsageError
from loadgen.workload import traces
from loadgen.workload.lengths import MAX_LENGTH_TOKENS, Fixed
from loadgen.workload.plan import Mixture, Part, plan_trace
from loadgen.workload.traces import Trace, TraceRow, Window, parse_trace, read_trace, sped_up

BURST_HEAD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = (
    BURST_HEAD,
    "5,ChatGPT,472,18,490,Conversation log",
    "45.5,GPT-4,1087,0,1087,API log",
    "45.5,ChatGPT,10,230,240,Conversation log",
    "118,ChatGPT,417,276,693,Conversation log",
)
AZURE = (
    AZURE_HEAD,
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "2023-11-16 18:15:51.2224670,879,55",
)
ALL = Window(0.0, None)


def parse(*lines: str, window: Window = ALL) -> Trace:
    return parse_trace("t.csv", [f"{line}\n" for line in lines], window)


def test_burstgpt_rows_are_relative_and_failed_ones_left_out() -> None:
    trace = parse(*BURST)
    assert trace.columns == "BurstGPT"
    assert trace.rows == (TraceRow(0, 472, 18), TraceRow(40.5, 10, 230), TraceRow(113, 417, 276))
    assert trace.skipped_rows == 1
    assert trace.duration_s == pytest.approx(113)
    assert trace.rows[-1].at_s < trace.duration_s


def test_later_burstgpt_files_have_more_columns_in_another_order() -> None:
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type"
    assert parse(head, "1,,2.5,GPT-4,7,8,API log").rows == (TraceRow(0, 7, 8),)


def test_azure_times_of_both_years() -> None:
    trace = parse(*AZURE)
    assert trace.columns == "Azure"
    assert [row.prompt_tokens for row in trace.rows] == [374, 396, 879]
    assert [row.at_s for row in trace.rows] == pytest.approx([0, 4.314579, 4.541877], abs=1e-5)
    later = parse(
        AZURE_HEAD, "2024-05-10 00:00:00.009930+00:00,1,2", "2024-05-10 00:00:01.009930+00:00,3,4"
    )
    assert later.rows[1].at_s == pytest.approx(1.0)


def test_a_window_is_half_open_and_reading_stops_behind_it() -> None:
    trace = parse(*BURST, "119,broken,-1,x,x,x", window=Window(40.5, 72.5))
    assert trace.rows == (TraceRow(0, 10, 230),)
    assert trace.duration_s == 72.5
    faster = sped_up(trace, 10.0)
    assert faster.duration_s == pytest.approx(7.25)
    assert sped_up(parse(*AZURE), 2.0).rows[1].at_s == pytest.approx(4.314579 / 2, abs=1e-5)


def test_the_plan_has_the_traces_times_and_lengths() -> None:
    tiers = (("interactive", 1.0), ("batch", 1.0))
    workload = (Part(1.0, Mixture(Fixed(1), Fixed(1), tiers, 0, 0)),)
    rows = parse(*BURST).rows
    plan = plan_trace(rows, workload, length_scale=0.5, seed=1, run_id="r")
    assert [each.at_s for each in plan] == [0, 40.5, 113]
    assert [(each.prompt_tokens, each.output_tokens) for each in plan] == [
        (236, 9), (5, 115), (208, 138),
    ]  # fmt: skip
    assert all(each.tier in ("interactive", "batch") for each in plan)


HOSTILE = [
    ((), "is empty"),
    (("",), "is empty"),
    ((" , ,",), "is empty"),
    (("a,b,c", "1,2,3"), "has the columns 'a, b, c'; it needs Timestamp, Request tokens"),
    (("TIMESTAMP,ContextTokens", "x,1"), "it needs Timestamp"),
    ((f"{AZURE_HEAD},ContextTokens", "x,1,2,3"), "each once"),
    ((BURST_HEAD,), "no request with tokens"),
    ((BURST_HEAD, "1,m,0,5,5,l"), "no request with tokens"),
    ((BURST_HEAD, "1,m,5,5"), "Row 2 of --trace t.csv has 4 cells and the header 6"),
    ((BURST_HEAD, "1,m,5,5,10,l,extra"), "has 7 cells"),
    ((BURST_HEAD, "nan,m,5,5,10,l"), "Timestamp 'nan', which is not a time"),
    ((BURST_HEAD, "inf,m,5,5,10,l"), "not a time"),
    ((BURST_HEAD, "-3,m,5,5,10,l"), "not a time"),
    ((BURST_HEAD, ",m,5,5,10,l"), "not a time"),
    ((BURST_HEAD, "1e999,m,5,5,10,l"), "not a time"),
    ((BURST_HEAD, f"{'x' * 300},m,5,5,10,l"), "xxx…', which is not a time"),
    ((AZURE_HEAD, "yesterday,5,5"), "TIMESTAMP 'yesterday', which is not a time"),
    ((AZURE_HEAD, "0001-01-01 00:00:00,5,5"), "not a time"),
    ((AZURE_HEAD, "9999-99-99 00:00:00,5,5"), "not a time"),
    ((BURST_HEAD, "1,m,nan,5,10,l"), "Request tokens 'nan', which is not a whole number"),
    ((BURST_HEAD, "1,m,-5,5,10,l"), "Request tokens '-5'"),
    ((BURST_HEAD, "1,m,5,5.5,10,l"), "Response tokens '5.5'"),
    ((BURST_HEAD, "1,m,5,,10,l"), "Response tokens ''"),
    ((BURST_HEAD, f"1,m,{MAX_LENGTH_TOKENS + 1},5,10,l"), "from 0 to 1000000"),
    ((BURST_HEAD, f"1,m,{'9' * 400},5,10,l"), "Request tokens '9999"),
    ((BURST_HEAD, "2,m,5,5,10,l", "1,m,5,5,10,l"), "Row 3 of --trace t.csv is earlier"),
    ((BURST_HEAD, '1,"m,5,5,10,l'), "is not CSV"),
    ((BURST_HEAD, "1,m\x00,\x1b[31m5,5,10,l"), "Request tokens '?[31m5'"),
]


@pytest.mark.parametrize(("lines", "said"), HOSTILE)
def test_hostile_files_are_refused_in_one_sentence(lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse(*lines)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00\x01", "is not text in UTF-8"),
        (f"{BURST_HEAD}\n{'7' * 5000}".encode(), "Line 2 of --trace"),
        (f"{AZURE_HEAD}\nnan,1,1\n".encode(), "not a time"),
        (None, "cannot be read"),
    ],
)
def test_the_command_ends_with_one_sentence_and_status_2(
    tmp_path: Path, content: bytes | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_bytes(content)
    assert main(["run", "--trace", str(path)]) == 2
    stderr = capsys.readouterr().err
    assert said in stderr
    assert stderr.count("\n") == 1


def test_more_requests_than_one_run_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traces, "MAX_PLANNED_REQUESTS", 2)
    with pytest.raises(UsageError, match="more than 2 requests"):
        parse(*AZURE)
    assert len(parse(*AZURE, window=Window(0.0, 4.4)).rows) == 2


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join((*AZURE, "")).encode())
    assert len(read_trace(path, ALL).rows) == 3


def said_of(*lines: str) -> str | None:
    """Why a trace is refused, None if it is not."""
    try:
        return None if parse(*lines).rows else "empty"
    except UsageError as error:
        return str(error)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=60), max_size=6))
def test_any_text_is_read_or_refused(tail: list[str]) -> None:
    for head in (AZURE_HEAD, BURST_HEAD):
        said = said_of(head, *tail)
        assert said is None or said.isprintable()


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(
        st.tuples(st.floats(0, 1e6), st.integers(1, 10_000), st.integers(1, 10_000)),
        min_size=1,
        max_size=30,
    ).map(sorted)
)
def test_every_row_becomes_one_request(rows: list[tuple[float, int, int]]) -> None:
    lines = [f"{at_s!r},m,{prompt},{output},0,l" for at_s, prompt, output in rows]
    trace = parse(BURST_HEAD, *lines)
    assert [(row.prompt_tokens, row.output_tokens) for row in trace.rows] == [
        (prompt, output) for _, prompt, output in rows
    ]
    assert all(0 <= row.at_s < trace.duration_s for row in trace.rows)
