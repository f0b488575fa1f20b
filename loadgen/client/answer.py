"""Reads one OpenAI stream: bytes and arrival times in, an `Answer` and maybe a `Failure` out.

Sans-IO: `client` feeds it the socket's bytes with their times. It detects the answer's end
(`[DONE]` or an error event), and `failure_at_end` judges an ended stream: without a finish_reason
the answer was silently truncated, even if the connection closed cleanly.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from loadgen.client.sse import SseOverflowError, SseParser
from loadgen.report.records import Answer, Failure, FailureKind

FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal")
MAX_MESSAGE_CHARS = 300


class Endpoint(StrEnum):
    """Which of the two generating endpoints is called."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class AnswerReader:
    """Folds the chunks of one response body into an answer."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._parser = SseParser()
        self._chunk_times_s: list[float] = []
        self._texts: list[str] = []
        self._finish_reason: str | None = None
        self._ended_s: float | None = None
        self._saw_done = False
        self._prompt_tokens: int | None = None
        self._output_tokens: int | None = None
        self._failure: Failure | None = None

    @property
    def ended(self) -> bool:
        """Whether the stream has reported its end: nothing after this counts."""
        return self._ended_s is not None

    @property
    def has_text(self) -> bool:
        """Whether a first chunk with text has arrived."""
        return bool(self._chunk_times_s)

    def feed(self, chunk: bytes, now_s: float) -> int:
        """Take bytes that arrived at `now_s`; return how many chunks with text they completed."""
        before = len(self._chunk_times_s)
        try:
            events = self._parser.feed(chunk)
        except SseOverflowError as error:
            self._fail(Failure(FailureKind.BAD_STREAM, "overflow", str(error)), now_s)
            return 0
        for event in events:
            if self.ended:
                break
            self._take_event(event, now_s)
        return len(self._chunk_times_s) - before

    def answer(self) -> Answer:
        """Return the answer so far."""
        return Answer(
            chunk_times_s=tuple(self._chunk_times_s),
            ended_s=self._ended_s,
            finish_reason=self._finish_reason,
            saw_done=self._saw_done,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            keep_alives=self._parser.comments,
            text="".join(self._texts),
        )

    def failure_at_end(self) -> Failure | None:
        """Return the failure of an answer whose stream ended without an exception, if any."""
        if self._failure is not None:
            return self._failure
        if self._finish_reason is None:
            chunks = len(self._chunk_times_s)
            ending = "[DONE]" if self._saw_done else "the end of the stream"
            return Failure(
                FailureKind.SILENT_TRUNCATION,
                "no_finish_reason",
                f"{ending} came after {chunks} chunks with text, without a finish_reason",
            )
        if self._finish_reason not in FINISH_REASONS:
            return Failure(
                FailureKind.BAD_FINISH, self._finish_reason, "not a finish_reason of the API"
            )
        return None

    def _take_event(self, event: str, now_s: float) -> None:
        if event.strip() == "[DONE]":
            self._saw_done = True
            self._ended_s = now_s
            return
        try:
            body = json.loads(event)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            excerpt = event[:MAX_MESSAGE_CHARS]
            self._fail(Failure(FailureKind.BAD_STREAM, "not_json", f"event: {excerpt}"), now_s)
        elif (failure := error_in(body)) is not None:
            self._fail(failure, now_s)
        else:
            self._take_usage(body.get("usage"))
            self._take_choice(body.get("choices"), now_s)

    def _take_usage(self, usage: object) -> None:
        if isinstance(usage, dict):
            self._prompt_tokens = _count(usage.get("prompt_tokens"), self._prompt_tokens)
            self._output_tokens = _count(usage.get("completion_tokens"), self._output_tokens)

    def _take_choice(self, choices: object, now_s: float) -> None:
        """Read choice 0 only: requests ask for one."""
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        choice = choices[0]
        finish_reason = choice.get("finish_reason")
        if _has_text(self._endpoint, choice):
            self._chunk_times_s.append(now_s)
            self._texts.append(_text_of(self._endpoint, choice))
        if isinstance(finish_reason, str):
            self._finish_reason = finish_reason

    def _fail(self, failure: Failure, now_s: float) -> None:
        self._failure = failure
        self._ended_s = now_s


def error_in(body: Mapping[str, Any]) -> Failure | None:
    """Return the error in an event or a response body, as an in-band failure."""
    error = body.get("error")
    if error is None and body.get("object") == "error":
        error = body
    if error is None:
        return None
    if not isinstance(error, dict):
        return Failure(FailureKind.IN_BAND_ERROR, "unknown", str(error)[:MAX_MESSAGE_CHARS])
    code = error.get("code") or error.get("type") or "unknown"
    message = str(error.get("message", ""))[:MAX_MESSAGE_CHARS]
    return Failure(FailureKind.IN_BAND_ERROR, str(code), message)


def _has_text(endpoint: Endpoint, choice: Mapping[str, Any]) -> bool:
    """Return whether a chunk has text, reasoning, or a part of a tool call's name or arguments.

    Servers also send chunks without any: to open a message, for half of a character, while a parser
    waits, and to finish. Users see nothing of them, and `usage` counts their tokens.
    """
    if endpoint is Endpoint.COMPLETIONS:
        return bool(choice.get("text"))
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return False
    calls = delta.get("tool_calls")
    return (
        any(delta.get(field) for field in TEXT_FIELDS)
        or _is_called(delta.get("function_call"))
        or (
            isinstance(calls, list)
            and any(isinstance(each, dict) and _is_called(each.get("function")) for each in calls)
        )
    )


def _text_of(endpoint: Endpoint, choice: Mapping[str, Any]) -> str:
    """Return the text of a chunk that clients send back in the next turn: no reasoning, no call."""
    delta = choice if endpoint is Endpoint.COMPLETIONS else choice["delta"]
    text = delta.get("text" if endpoint is Endpoint.COMPLETIONS else "content")
    return text if isinstance(text, str) else ""


def _is_called(function: object) -> bool:
    """Return whether a part of a call has some of its name or arguments."""
    return isinstance(function, dict) and bool(function.get("name") or function.get("arguments"))


def _count(value: object, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and value >= 0 else otherwise
