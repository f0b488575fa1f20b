"""Every error that a client can get: OpenAI's shape, one table of codes, and the conversions.

vLLM, Starlette and FastAPI each have their own error bodies. `shape_error` turns any of them, and
any failure of a task, into one `ApiError`. No error reveals the server's internals. Pure.
"""

import math
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

import msgspec

RETRY_AFTER_S = 1
"""Default for when an overloaded or unavailable server is worth another try."""

RETRY_AFTER_MAX_S = 60
"""OpenAI's clients do not obey a longer wait."""

MESSAGE_CHARS_MAX = 1_000
"""Longest message in an error."""
PARAM_CHARS_MAX = 200
"""Longest field name in an error. With both limits, and JSON's escapes, it stays below 8 KiB."""
READ_CHARS_MAX = 4 * MESSAGE_CHARS_MAX
"""A longer line repeats the client's input and would take seconds to search."""
UNKNOWN_CODE_STATUS = 500
MODEL_NOT_FOUND_MESSAGE = "The model does not exist: GET /v1/models lists what is served."
SERVER_ERROR_MESSAGE = "The server had an error while it processed the request."
MEDIA_TEXT = (
    "This server has text models alone: send messages of text, without images, audio, video and "
    "files."
)
NO_TOOL_PARSER = (
    "This server reads no tool calls: its operator has to start it with --enable-auto-tool-choice "
    "and --tool-call-parser NAME."
)

_REQUEST = "invalid_request_error"
_UNAVAILABLE = "service_unavailable_error"
_SERVER = "server_error"

CODES: Final[dict[str, tuple[int, str]]] = {
    "invalid_http": (400, _REQUEST),
    "invalid_json": (400, _REQUEST),
    "invalid_value": (400, _REQUEST),
    "unsupported_parameter": (400, _REQUEST),
    "context_length_exceeded": (400, _REQUEST),
    "invalid_api_key": (401, "authentication_error"),
    "api_key_expired": (401, "authentication_error"),
    "api_key_revoked": (401, "authentication_error"),
    "permission_denied": (403, "permission_error"),
    "model_not_found": (404, _REQUEST),
    "unknown_url": (404, _REQUEST),
    "not_found": (404, _REQUEST),
    "method_not_allowed": (405, _REQUEST),
    "request_timeout": (408, _REQUEST),
    "conflict": (409, _REQUEST),
    "request_in_progress": (409, _REQUEST),
    "request_too_large": (413, _REQUEST),
    "unsupported_media_type": (415, _REQUEST),
    "headers_too_large": (431, _REQUEST),
    "quota_exceeded": (429, "rate_limit_error"),
    "token_budget_exceeded": (429, "rate_limit_error"),
    "parallel_limit_exceeded": (429, "rate_limit_error"),
    "rate_limit_exceeded": (429, "rate_limit_error"),
    "queue_full": (429, "rate_limit_error"),
    "tier_capacity": (429, "rate_limit_error"),
    "internal_error": (500, _SERVER),
    "worker_lost": (500, _SERVER),
    "not_implemented": (501, _SERVER),
    "no_healthy_workers": (503, _UNAVAILABLE),
    "not_serving": (503, _UNAVAILABLE),
    "storage_full": (503, _UNAVAILABLE),
    "storage_unavailable": (503, _UNAVAILABLE),
    "draining": (503, _UNAVAILABLE),
    "too_many_connections": (503, _UNAVAILABLE),
    "switching_timeout": (503, _UNAVAILABLE),
    "deadline_exceeded": (504, "timeout_error"),
}
"""Code -> (HTTP status, type)."""

_CODE_OF_STATUS: Final[dict[int, str]] = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "permission_denied",
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    422: "invalid_value",
    429: "rate_limit_exceeded",
    501: "not_implemented",
    503: "no_healthy_workers",
    504: "deadline_exceeded",
}

_NO_RETRY = frozenset(
    {
        *("conflict", "deadline_exceeded", "quota_exceeded", "request_too_large"),
        *("token_budget_exceeded", "worker_lost"),
    }
)
_RETRY_SOON = frozenset({"request_in_progress"})
_CODE_TEXT = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TOO_LONG = re.compile(r"maximum (model|context) length|longer than the maximum", re.IGNORECASE)
_BAD_JSON = re.compile(r"json decode error|json_invalid|error parsing the body", re.IGNORECASE)
_VALUE_ECHO = re.compile(r" \((?:parameter|value)=")
_QUOTED = re.compile(r"""(?<!\w)'.*'(?!\w)|".*"|`.*`""")
_INSIDES = re.compile(
    r"(?i:validation errors?|input_value|Traceback|<class|0x[0-9a-f]{4}|\w+\.\w+\.\w+|\w\(\)"
    r"|vllm|grammar|schema|regex)"
    r"|\b[A-Z]\w+(?:Error|Exception|Iterator|Param|Request|Config)\b"
)
"""Words of Python, pydantic and vLLM that mean nothing to a client, or quote its grammar."""


PARAMETERS: Final = frozenset(
    {
        *("add_generation_prompt", "continue_final_message", "echo", "frequency_penalty", "input"),
        *("logit_bias", "logprobs", "max_completion_tokens", "max_output_tokens", "max_tokens"),
        *("messages", "min_p", "min_tokens", "model", "n", "presence_penalty", "prompt"),
        *("prompt_logprobs", "reasoning_effort", "repetition_penalty", "response_format", "seed"),
        *("stop", "stop_token_ids", "stream", "stream_options", "structured_outputs", "suffix"),
        *("temperature", "thinking_token_budget", "tool_choice", "tools", "top_k", "top_logprobs"),
        *("top_p", "truncate_prompt_tokens", "truncation"),
        *("output_config", "stop_sequences", "system", "thinking"),
    }
)
"""Parameters whose names an error may repeat: they are no client's text."""
API_WORDS: Final = frozenset({"auto", "content", "function", "name", "none", "required", "role"})
"""Words of the API beside its parameters."""
_NAMED = re.compile(r"[`'\"]((\w+)(?:=(?:True|False|\d{1,9}))?)[`'\"]")
_IN_OUR_WORDS: Final = (
    ("is not a multimodal model", MEDIA_TEXT, None),
    ("--tool-call-parser", NO_TOOL_PARSER, "tools"),
    (
        "'json_schema' field must be provided",
        "A response_format of type json_schema needs the field json_schema.",
        "response_format",
    ),
    (
        "cannot be converted to integer token IDs",
        'logit_bias takes token ids, such as {"42": 1}.',
        "logit_bias",
    ),
)
"""Part of a message of vLLM's, the message instead, and its parameter if there is always one.

vLLM's own name Python's insides, or say nothing once what the client wrote is left out.
"""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error in the form that OpenAI's clients understand."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: int = RETRY_AFTER_S
    retry_after_ms: int = 0
    """The same wait in milliseconds; 0 means `retry_after_s`."""
    extra_headers: tuple[tuple[bytes, bytes], ...] = ()

    def body(self) -> bytes:
        """Return the JSON of the whole answer."""
        fields = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": fields})

    def with_retry_after(self, wait_ms: int) -> "ApiError":
        """Return the same error with another wait."""
        return replace(self, retry_after_s=math.ceil(wait_ms / 1_000), retry_after_ms=wait_ms)

    def with_headers(self, headers: list[tuple[bytes, bytes]]) -> "ApiError":
        """Return the same error with more headers."""
        return replace(self, extra_headers=(*self.extra_headers, *headers))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the answer's headers: its type, and whether and when to try again."""
        headers = [(b"content-type", b"application/json")]
        if self.status in (429, 503) or self.code in _RETRY_SOON:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
            # OpenAI's clients prefer this one.
            wait_ms = self.retry_after_ms or self.retry_after_s * 1_000
            headers.append((b"retry-after-ms", str(wait_ms).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.code in _NO_RETRY:
            headers.append((b"x-should-retry", b"false"))
        return [*headers, *self.extra_headers]


def api_error(
    code: str, message: str, param: str | None = None, *, retry_after_s: int = 0
) -> ApiError:
    """Return an error of a known code; an unknown code gets status 500.

    Message and parameter are truncated. A `retry_after_s` of 0 is unknown.
    """
    if not _CODE_TEXT.fullmatch(code):
        code = "internal_error"
    status, kind = CODES.get(code, (UNKNOWN_CODE_STATUS, _SERVER))
    retry_s = min(max(retry_after_s or RETRY_AFTER_S, 1), RETRY_AFTER_MAX_S)
    text = (message or SERVER_ERROR_MESSAGE)[:MESSAGE_CHARS_MAX]
    return ApiError(status, kind, code, text, param and param[:PARAM_CHARS_MAX], retry_s)


class RequestState:
    """State that the HTTP side and the engine side of one request share."""

    __slots__ = (
        "cached_tokens",
        "cell",
        "deadline_ms",
        "failure",
        "finish_reasons",
        "first_token_at_s",
        "generated_tokens",
        "give_up",
        "grammar_field",
        "group",
        "layout",
        "prompt_tokens",
        "queue_wait_ms",
        "relayed_tokens",
        "streams",
        "switches",
        "tenant",
        "trace",
    )

    def __init__(self, tenant: str = "", deadline_ms: int = 0) -> None:
        """Start without a failure; a deadline of 0 is none."""
        self.failure: ApiError | None = None
        self.tenant = tenant
        self.deadline_ms = deadline_ms
        self.prompt_tokens = 0
        """Tokens of all its prompts; a prompt of several choices counts once."""
        self.cached_tokens = 0
        """Tokens of its prompts that were in the prefix cache."""
        self.first_token_at_s = 0.0
        """When the relay got the first token, on its clock; 0 before that."""
        self.cell = ""
        """The cell that had the task that ended last; empty if it has no name."""
        self.layout = ""
        """That cell's layout at that time; empty if unknown."""
        self.group = ""
        """The group that computed that task's last token; empty if unknown."""
        self.switches = 0
        """Most changes of the layout that one of its tasks met."""
        self.relayed_tokens = 0
        """Tokens handed to vLLM's front end."""
        self.generated_tokens = 0
        """Tokens it has processed: it makes the next part of a stream after the last was sent."""
        self.streams: list[AsyncGenerator[object, None]] = []
        """vLLM's generators for the request; each one that has not ended must be closed."""
        self.give_up: Callable[[], None] | None = None
        """Ends a stream whose client does not read."""
        self.finish_reasons: tuple[str, ...] = ()
        self.grammar_field: str | None = None
        """The parameter that holds the request's grammar or schema, if any."""
        self.trace = ""
        """The `traceparent` of the request's span; empty if it is not traced."""
        self.queue_wait_ms: int | None = None
        """Wait for a group, the longest of several choices; None until the first token."""

    @property
    def output_tokens(self) -> int:
        """Tokens made for the request, also where its client left before the whole answer."""
        # vLLM processes a whole answer at its end, so an abandoned one has relayed tokens alone.
        return self.generated_tokens or self.relayed_tokens

    async def close(self) -> None:
        """Close the generators that are still running.

        If a client stops reading, nobody awaits them, and they would go on until Python collects
        them.
        """
        while self.streams:
            with suppress(RuntimeError):  # It is being closed already.
                await self.streams.pop().aclose()


current_request: ContextVar[RequestState | None] = ContextVar("current_request", default=None)
"""Set around the application's call; the tasks it starts inherit the same object."""


class _AnyFields(msgspec.Struct):
    message: object = None
    param: object = None
    code: object = None


class _AnyError(msgspec.Struct):
    error: object = None
    detail: object = None


def shape_error(status: int, body: bytes, failure: ApiError | None = None) -> ApiError:
    """Turn an answer's status and body into an error; a task's failure takes precedence."""
    if failure is not None:
        return failure
    fields = _read_fields(body)
    if isinstance(fields.code, str) and fields.code in CODES:
        return api_error(fields.code, str(fields.message or ""), _text(fields.param))
    if status == 500 or status > 504 or status not in _CODE_OF_STATUS:
        return api_error("internal_error", SERVER_ERROR_MESSAGE)
    raw = str(fields.message or "")
    message = strip_echo(raw) or "The request is not valid: check its parameters and schemas."
    code = _code_for(status, raw, fields.param)
    if code == "model_not_found":
        message = MODEL_NOT_FOUND_MESSAGE
    for part, sentence, named in _IN_OUR_WORDS:
        if status in (400, 422) and part in raw[:READ_CHARS_MAX]:
            return api_error("invalid_value", sentence, named or _text(fields.param))
    # For a prompt that is too long vLLM names an internal field, not one of the request's.
    param = None if code == "context_length_exceeded" else _text(fields.param)
    if code == "invalid_value":
        param = param or parameter_in(raw)
    return api_error(code, message, param)


def failed_event(chunk: bytes, failure: ApiError | None) -> ApiError:
    """Turn vLLM's in-band error event into an error."""
    body = chunk.removeprefix(b"data: ").strip()
    code = _read_fields(body).code
    return shape_error(code if isinstance(code, int) else 500, body, failure)


def strip_echo(message: str) -> str:
    """Strip quotes of the request and server internals from vLLM's message; may return "".

    Quoted text probably comes from the request.
    """
    first_line = _VALUE_ECHO.split(message, maxsplit=1)[0].partition("\n")[0]
    if len(first_line) > READ_CHARS_MAX:
        return ""
    plain = _QUOTED.sub("…", _NAMED.sub(_keep_parameter, first_line))
    return "" if _INSIDES.search(plain) else plain[:MESSAGE_CHARS_MAX]


def parameter_in(message: str) -> str | None:
    """Return the first parameter that a message of vLLM's names, if any."""
    words = _WORD.findall(message[:READ_CHARS_MAX])
    return next((word for word in words if word in PARAMETERS and "_" in word), None)


def _keep_parameter(quoted: re.Match[str]) -> str:
    is_known = quoted.group(2) in PARAMETERS or quoted.group(2) in API_WORDS
    return quoted.group(1) if is_known else quoted.group()


def _code_for(status: int, message: str, param: object) -> str:
    if status in (400, 422):
        if _TOO_LONG.search(message):
            return "context_length_exceeded"
        if _BAD_JSON.search(message):
            return "invalid_json"
    if status == 404 and param == "model":
        return "model_not_found"
    return _CODE_OF_STATUS[status]


def _read_fields(body: bytes) -> _AnyFields:
    try:
        answer = msgspec.json.decode(body, type=_AnyError)
        if isinstance(answer.error, dict):
            return msgspec.convert(answer.error, _AnyFields)
    except msgspec.MsgspecError:
        return _AnyFields()
    return _AnyFields(message=answer.error or answer.detail)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
