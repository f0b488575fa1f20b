"""The lines of batch files: checks of input lines, and the form of result lines. Pure.

Input lines are checked as OpenAI does: any invalid one fails the whole batch before it begins, with
its number and a code. Faults in a request itself are found when it runs.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.batches.terms import BatchRecord, LineError, Status, Usage, counted
from gateway.errors import SERVER_ERROR_MESSAGE, api_error

LINES_MAX = 50_000
"""Most lines of an input file."""
LINE_BYTES_MAX = 8 * 1024**2
"""Longest line of an input file; the limit of a request's body bounds it too."""
CUSTOM_ID_CHARS_MAX = 512
MODEL_CHARS_MAX = 256
ERRORS_MAX = 100
"""Most reported errors of one input file."""

NOT_RUN: Final[dict[Status, tuple[str, str]]] = {
    Status.FINALIZING: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    Status.CANCELLING: (
        "batch_cancelled",
        "This request was not executed because the batch was cancelled.",
    ),
}
"""Status in which the files are written -> code and message of lines without a result."""

_NO_JSON: Final = api_error("internal_error", SERVER_ERROR_MESSAGE).body()


class _Line(msgspec.Struct):
    custom_id: object = None
    method: object = None
    url: object = None
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    model: object = None
    stream: object = None


@dataclass(frozen=True, slots=True)
class Line:
    """An input line."""

    number: int
    """From 1."""
    custom_id: str
    body: bytes
    model: str


class Result(msgspec.Struct, frozen=True):
    """A line's result: one line of the output file or of the error file."""

    number: int
    text: bytes
    is_ok: bool
    usage: Usage = Usage()


class InvalidLineError(Exception):
    """A line of an input file cannot be run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def read_line(text: bytes, number: int, endpoint: str) -> Line:
    """Read an input line; raises `InvalidLineError`, whose text quotes nothing of the line."""
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidLineError("invalid_json_line", "This line is not a JSON object.") from error
    custom_id, body = line.custom_id, bytes(line.body)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_CHARS_MAX:
        text_ = f"custom_id must be a text of 1 to {CUSTOM_ID_CHARS_MAX} characters."
        raise InvalidLineError("missing_required_parameter", text_, "custom_id")
    if line.method != "POST":
        raise InvalidLineError("invalid_method", "method must be POST.", "method")
    if line.url != endpoint:
        raise InvalidLineError(
            "mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}.", "url"
        )
    return Line(number, custom_id, body, _check_body(body))


def _check_body(body: bytes) -> str:
    """Return the model that a request's body names."""
    try:
        fields = msgspec.json.decode(body, type=_Body) if body else None
    except msgspec.MsgspecError:
        fields = None
    if fields is None:
        raise InvalidLineError("missing_required_parameter", "body must be an object.", "body")
    if fields.stream not in (None, False):
        text = "Requests of a batch cannot be streamed: leave stream out."
        raise InvalidLineError("unsupported_parameter", text, "body.stream")
    if not isinstance(fields.model, str) or not 0 < len(fields.model) <= MODEL_CHARS_MAX:
        text = f"body.model must be a text of 1 to {MODEL_CHARS_MAX} characters."
        raise InvalidLineError("missing_required_parameter", text, "body.model")
    return fields.model


@dataclass(slots=True)
class Survey:
    """The outcome of reading a whole input file: its lines' offsets, or its errors."""

    endpoint: str
    starts: list[int] = field(default_factory=list)
    """Offset of each line's first byte; blank lines do not count."""
    model: str = ""
    errors: list[LineError] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        """Whether further lines cannot change the outcome."""
        return len(self.errors) >= ERRORS_MAX

    def look(self, text: bytes, start: int) -> None:
        """Check the next line of the file."""
        if not text.strip():
            return
        self.starts.append(start)
        number = len(self.starts)
        if number > LINES_MAX:
            if number == LINES_MAX + 1:
                self._note("too_many_tasks", f"A file may have {LINES_MAX} lines at most.")
            return
        if len(text) > LINE_BYTES_MAX:
            self._note("line_too_long", f"A line may have {LINE_BYTES_MAX} bytes at most.", number)
            return
        try:
            line = read_line(text, number, self.endpoint)
        except InvalidLineError as error:
            self._note(error.code, error.message, number, error.param)
            return
        if line.custom_id in self._ids:
            text_ = "An earlier line has this custom_id too: use each one once."
            self._note("duplicate_custom_id", text_, number, "custom_id")
        elif self.model and line.model != self.model:
            text_ = "All lines of a batch must name the same model."
            self._note("mismatched_model", text_, number, "body.model")
        self._ids.add(line.custom_id)
        self.model = self.model or line.model

    def finish(self) -> None:
        """Check the file as a whole, after its last line."""
        if not self.starts:
            self._note("empty_file", "The input file has no lines.")
        self._ids.clear()

    def _note(
        self, code: str, message: str, line: int | None = None, param: str | None = None
    ) -> None:
        if not self.is_full:
            self.errors.append(LineError(code=code, message=message, line=line, param=param))


def answered(batch: str, line: Line, status: int, request_id: str, body: bytes) -> Result:
    """Return the result of an answered line; an error goes to the error file."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError:
        status, body = 500, _NO_JSON
    if b"\n" in body or b"\r" in body:
        # Only whitespace outside of strings contains them; a result must be one line.
        body = msgspec.json.format(body, indent=-1)
    is_ok = 200 <= status < 300
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    text = _result_line(batch, line.number, line.custom_id, response, None)
    return Result(line.number, text, is_ok, usage_of(body) if is_ok else Usage())


def with_results(batch: BatchRecord, results: Collection[Result]) -> BatchRecord:
    """Return the batch with these further results counted."""
    completed = sum(result.is_ok for result in results)
    usage = sum((result.usage for result in results), Usage())
    return counted(batch, completed, len(results) - completed, usage)


def not_run(batch: str, status: Status, number: int, custom_id: str) -> bytes:
    """Return the error file's line for a line that has no result when the batch ends."""
    code, message = NOT_RUN[status]
    return _result_line(batch, number, custom_id, None, {"code": code, "message": message})


def _result_line(batch: str, number: int, custom_id: str, response: Any, error: Any) -> bytes:
    # A line's id does not depend on the process, so a file written again after a crash is
    # identical.
    name = hashlib.sha256(f"{batch}/{number}".encode()).hexdigest()[:24]
    fields = {"id": f"batch_req_{name}", "custom_id": custom_id}
    return msgspec.json.encode({**fields, "response": response, "error": error})


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Tokens(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Tokens | None = None


def usage_of(body: bytes) -> Usage:
    """Return the tokens that an answer reports as used."""
    try:
        tokens = msgspec.json.decode(body, type=_Answer).usage or _Tokens()
    except msgspec.MsgspecError:
        tokens = _Tokens()
    of_prompt = tokens.prompt_tokens_details or _Details()
    of_answer = tokens.completion_tokens_details or _Details()
    return Usage(
        tokens.prompt_tokens or 0,
        of_prompt.cached_tokens or 0,
        tokens.completion_tokens or 0,
        of_answer.reasoning_tokens or 0,
    )


def split_results(
    batch: str,
    status: Status,
    custom_ids: Iterable[tuple[int, str]],
    results: Iterable[Result],
) -> Iterator[tuple[bool, bytes]]:
    """Yield, for every line in order, whether it belongs to the output file, and its text.

    Both arguments are ordered by line number; lines without a result were not run.
    """
    waiting = iter(results)
    result = next(waiting, None)
    for number, custom_id in custom_ids:
        if result is not None and result.number == number:
            yield result.is_ok, result.text
            result = next(waiting, None)
        else:
            yield False, not_run(batch, status, number, custom_id)
    assert result is None, "a result belongs to no line."
