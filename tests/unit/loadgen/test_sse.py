"""The SSE parser: its events do not depend on how the bytes were cut."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadgen.client.sse import MAX_EVENT_BYTES, SseOverflowError, SseParser

LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
TEXT = st.text(st.characters(exclude_characters="\r\n\x00", exclude_categories=["Cs"]))
# Most bytes that matter to the parser, so that random streams reach every branch often.
SPICY_BYTES = st.lists(
    st.sampled_from(
        [b"data:", b"data", b":", b" ", b"\n", b"\r", b"\r\n", b"\n\n", b"id: 3", b"x", b"\xc3"]
    ),
    max_size=40,
).map(b"".join)


def parse(stream: bytes, cuts: list[int] | None = None) -> list[str]:
    parser = SseParser()
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts or []), len(stream)]
    chunks = [stream[start:end] for start, end in pairwise(edges)]
    return [event for chunk in chunks for event in parser.feed(chunk)]


@settings(deadline=None)
@given(stream=SPICY_BYTES, cuts=st.lists(st.integers(0, 500), max_size=20))
@example(stream=b"data: a\r\n\r\ndata: b\r\n\r\n", cuts=list(range(25)))
@example(stream=b"\xef\xbb\xbfdata: a\n\n", cuts=[1, 2, 3])
def test_cutting_the_stream_anywhere_changes_nothing(stream: bytes, cuts: list[int]) -> None:
    assert parse(stream, cuts) == parse(stream)


@settings(deadline=None)
@given(
    events=st.lists(st.lists(TEXT, min_size=1, max_size=3), max_size=6),
    line_end=LINE_ENDS,
    cuts=st.lists(st.integers(0, 1000), max_size=30),
)
def test_written_events_come_back(
    events: list[list[str]], line_end: bytes, cuts: list[int]
) -> None:
    written = b"".join(
        b"".join(b"data: " + line.encode() + line_end for line in lines) + line_end
        for lines in events
    )
    assert parse(written, cuts) == ["\n".join(lines) for lines in events]


def test_comments_fields_and_blank_lines_are_no_events() -> None:
    parser = SseParser()
    assert parser.feed(b": keep-alive\n\nevent: x\nid: 1\nretry: 5\n\n\n\n") == []
    assert parser.comments == 1


def test_only_one_space_is_taken_from_a_value() -> None:
    assert parse(b"data:a\n\ndata:  b\n\ndata\n\n") == ["a", " b", ""]


def test_a_byte_order_mark_is_dropped_only_at_the_start() -> None:
    assert parse(b"\xef\xbb\xbfdata: a\n\n") == ["a"]
    assert parse(b"data: a\n\n\xef\xbb\xbfdata: b\n\n") == ["a"]


def test_an_event_cut_by_the_end_of_the_stream_is_dropped() -> None:
    assert parse(b"data: a\n\ndata: b\n") == ["a"]


def test_an_endless_line_and_an_endless_event_are_refused() -> None:
    with pytest.raises(SseOverflowError):
        SseParser().feed(b"data: " + b"x" * (MAX_EVENT_BYTES + 1))
    parser = SseParser()
    line = b"data: " + b"x" * (MAX_EVENT_BYTES // 4) + b"\n"
    for _ in range(3):
        parser.feed(line)
    with pytest.raises(SseOverflowError):
        parser.feed(line + line)
