"""Reading one stream: which chunks have text, how it ended, and what is wrong with it."""

import json

import pytest

from loadgen.client.answer import AnswerReader, Endpoint
from loadgen.client.sse import MAX_EVENT_BYTES
from loadgen.report.records import FailureKind

DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def delta(delta: dict[str, object], finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def usage(prompt: int, output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


def read(*chunks: bytes, endpoint: Endpoint = Endpoint.COMPLETIONS) -> AnswerReader:
    """Feed chunk number n at n seconds."""
    reader = AnswerReader(endpoint)
    for second, chunk in enumerate(chunks):
        reader.feed(chunk, float(second))
    return reader


def kind_of(reader: AnswerReader) -> FailureKind | None:
    failure = reader.failure_at_end()
    return None if failure is None else failure.kind


def test_a_whole_completion() -> None:
    reader = read(text("a"), text("b"), text("c", "length"), usage(7, 3), DONE)
    answer = reader.answer()
    assert kind_of(reader) is None
    assert answer.chunk_times_s == (0.0, 1.0, 2.0)
    assert (answer.prompt_tokens, answer.output_tokens) == (7, 3)
    assert answer.finish_reason == "length"
    assert answer.saw_done
    assert answer.ended_s == 4.0
    assert answer.text == "abc"


def call(**function: str | None) -> dict[str, object]:
    return {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]}


def test_a_whole_chat_answer_does_not_count_the_role_as_text() -> None:
    reader = read(
        delta({"role": "assistant", "content": ""}),
        delta({"content": "a"}),
        delta({"reasoning_content": "b"}),
        delta(call(name="f", arguments="")),
        delta({}, "stop"),
        DONE,
        endpoint=Endpoint.CHAT,
    )
    assert reader.answer().chunk_times_s == (1.0, 2.0, 3.0)
    assert reader.answer().text == "a"  # clients send neither reasoning nor calls back
    assert kind_of(reader) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "é"},
        {"role": "assistant", "content": "a"},
        *({field: "b"} for field in ("reasoning_content", "reasoning", "refusal")),
        *(call(name="f"), call(arguments="{"), call(name="f", arguments="")),
        {"function_call": {"arguments": "{"}},
    ],
)
def test_the_first_text_is_the_first_chunk(fields: dict[str, object]) -> None:
    """Whatever comes before it: servers open messages early, and parsers wait."""
    empty: list[dict[str, object]] = [
        {"role": "assistant", "content": ""},
        {"content": ""},
        {"content": None},
        {},
        {"reasoning_content": ""},
        {"reasoning": None},
        {"tool_calls": []},
        {"tool_calls": None},
        {"tool_calls": [None]},
        {"tool_calls": [{"index": 0}]},
        {"tool_calls": [{"index": 0, "function": None}]},
        call(),
        call(name=None, arguments=""),
        {"function_call": None},
        {"function_call": {"name": ""}},
    ]
    chunks = [delta(each) for each in (*empty, fields)]
    chat = read(*chunks, endpoint=Endpoint.CHAT)
    assert chat.answer().chunk_times_s == (float(len(empty)),)


def test_a_completion_s_first_chunk_has_text() -> None:
    assert read(text(""), text(""), text("a", "stop")).answer().chunk_times_s == (2.0,)


def test_a_chunk_that_only_finishes_has_no_text() -> None:
    assert read(text("a"), text("", "stop")).answer().chunk_times_s == (0.0,)


def test_several_events_in_one_chunk_came_at_one_time() -> None:
    assert read(text("a") + text("b"), text("c", "stop")).answer().chunk_times_s == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("ending", [b"", DONE])
def test_an_end_without_finish_reason_is_silent_truncation(ending: bytes) -> None:
    reader = read(text("a"), text("b"), ending)
    failure = reader.failure_at_end()
    assert failure is not None
    assert failure.kind is FailureKind.SILENT_TRUNCATION
    assert "after 2 chunks with text" in failure.message


def test_an_empty_stream_is_silent_truncation() -> None:
    assert kind_of(read()) is FailureKind.SILENT_TRUNCATION


def test_a_finished_answer_without_done_is_whole_but_noticed() -> None:
    reader = read(text("a", "stop"))
    assert kind_of(reader) is None
    assert not reader.answer().saw_done
    assert not reader.ended


def test_a_finish_reason_of_the_engine_is_not_one_of_the_api() -> None:
    reader = read(text("a"), text("", "abort"), DONE)
    failure = reader.failure_at_end()
    assert failure is not None
    assert (failure.kind, failure.code) == (FailureKind.BAD_FINISH, "abort")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (
            {"error": {"message": "m", "type": "t", "code": "switching_timeout"}},
            "switching_timeout",
        ),
        ({"error": {"message": "m", "type": "server_error", "code": None}}, "server_error"),
        ({"error": {"message": "m", "code": 500}}, "500"),
        ({"object": "error", "message": "m", "code": 400}, "400"),
        ({"error": "boom"}, "unknown"),
        ({"error": {}}, "unknown"),
    ],
)
def test_an_error_event_ends_the_answer_even_before_done(body: object, code: str) -> None:
    reader = read(text("a"), event(body), text("b", "stop"), DONE)
    failure = reader.failure_at_end()
    assert failure is not None
    assert (failure.kind, failure.code) == (FailureKind.IN_BAND_ERROR, code)
    assert reader.answer().ended_s == 1.0
    assert len(reader.answer().chunk_times_s) == 1


@pytest.mark.parametrize(
    "bad", [b"data: {\n\n", b"data: 3\n\n", b"data: [1]\n\n", b"data: \xff\n\n"]
)
def test_what_is_not_a_json_object_is_a_bad_stream(bad: bytes) -> None:
    assert kind_of(read(text("a"), bad)) is FailureKind.BAD_STREAM


def test_an_endless_event_is_a_bad_stream() -> None:
    assert kind_of(read(b"data: " + b"x" * (MAX_EVENT_BYTES + 1))) is FailureKind.BAD_STREAM


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": None},
        {"choices": "x"},
        {"choices": [3]},
        {"choices": [{"delta": 3}]},
        {"usage": 3, "choices": []},
        {"usage": {"completion_tokens": "x"}, "choices": []},
    ],
)
def test_odd_but_harmless_events_are_skipped(body: object) -> None:
    reader = read(event(body), delta({"content": "a"}, "stop"), endpoint=Endpoint.CHAT)
    assert kind_of(reader) is None
    assert len(reader.answer().chunk_times_s) == 1
    assert reader.answer().output_tokens is None


def test_feed_says_how_many_chunks_came_and_counts_keep_alives() -> None:
    reader = AnswerReader(Endpoint.COMPLETIONS)
    seen = [(reader.feed(b": keep-alive\n\n", 0.0), reader.has_text)]
    seen.append((reader.feed(text("a") + text("b"), 1.0), reader.has_text))
    assert seen == [(0, False), (2, True)]
    assert reader.answer().keep_alives == 1
