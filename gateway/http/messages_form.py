"""How answers, streams and errors of Anthropic's Messages API look.

A stream begins with `message_start` and ends with `message_stop`, or with an `error` event. vLLM
names a message like a chat completion and reports cached tokens only at the end of a stream; the
names of tiers and of errors are Anthropic's. Pure.
"""

from typing import Any, Final

import msgspec

from gateway.errors import SERVER_ERROR_MESSAGE, ApiError, RequestState, api_error
from gateway.http.typed_events import fields_of, typed

MESSAGES_PATH: Final = "/v1/messages"
COUNT_TOKENS_PATH: Final = "/v1/messages/count_tokens"
API_KEY_HEADER: Final = "x-api-key"
"""Holds the key of a client, in place of `Authorization`."""
_MODELS_PATH: Final = "/v1/models"

_START = b"event: message_start\n"
_PREFACE: Final = (_START, b"event: ping\n")
_ERROR = b"event: error\n"
_ENDS: Final = (b"event: message_stop\n", _ERROR)

_TYPE_OF_STATUS: Final[dict[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors; other statuses below 500 are the request's fault."""
_TIER_NAMES: Final = {"priority": "priority", "default": "standard", "flex": "batch"}
"""OpenAI's names of the tiers that answer -> Anthropic's."""
_CHAT_ID, _MESSAGE_ID = "chatcmpl-", "msg_"


def is_messages_path(path: str) -> bool:
    """Return whether a path belongs to the Messages API, even if it does not exist."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def may_hold_key(method: str, path: str) -> bool:
    """Return whether Anthropic's clients send their key in `API_KEY_HEADER` there.

    They also list models, and get one by its name.
    """
    lists_models = path == _MODELS_PATH or path.startswith(f"{_MODELS_PATH}/")
    return is_messages_path(path) or (lists_models and method in ("GET", "HEAD"))


def messages_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the fields of an error; its message names the parameter, which has no field."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    text = error.message
    if error.param and error.param.lower() not in text.lower():
        text = f"{error.param}: {text}"
    nested = {"type": _TYPE_OF_STATUS.get(error.status, kind), "message": text}
    return {"type": "error", "error": nested, "request_id": request_id}


class MessagesForm:
    """The Messages API, for one answer."""

    always_names_tier = True

    def __init__(self, request_id: str) -> None:
        """Errors name the request."""
        self._request_id = request_id

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the request's id where Anthropic's clients look for it."""
        return [(b"request-id", self._request_id.encode())]

    def is_preface(self, event: bytes) -> bool:
        """Return whether the event only confirms that a message begins."""
        return event.startswith(_PREFACE)

    def find_error(self, event: bytes, state: RequestState) -> ApiError | None:
        """Return the task's failure, or a general error for one that vLLM reports."""
        if state.failure is None and event.startswith(_ERROR):
            return api_error("internal_error", SERVER_ERROR_MESSAGE)
        return state.failure

    def is_end(self, event: bytes) -> bool:
        """Return whether the event ends the message or reports its error."""
        return event.startswith(_ENDS)

    def event(self, event: bytes, service_tier: str, state: RequestState) -> bytes:
        """Name the message, its tier and its cached tokens where it begins."""
        if not event.startswith(_START):
            return event
        fields = fields_of(event)
        message = fields["message"]
        usage = message["usage"]
        if "cache_read_input_tokens" not in usage:
            usage["cache_read_input_tokens"] = state.cached_tokens
            usage["input_tokens"] = max(0, usage["input_tokens"] - state.cached_tokens)
        _name(message, service_tier)
        return typed(fields)

    def whole(self, body: bytes, service_tier: str) -> bytes:
        """Name the message and its tier; a number of tokens has neither."""
        answer = msgspec.json.decode(body)
        if answer.get("type") != "message":
            return body
        _name(answer, service_tier)
        return msgspec.json.encode(answer)

    def error_event(self, error: ApiError, last: bytes) -> bytes:  # noqa: ARG002
        """Return an `error` event."""
        return typed(messages_error(error, self._request_id))

    def error_body(self, error: ApiError) -> bytes:
        """Return the body of an answer that is an error."""
        return msgspec.json.encode(messages_error(error, self._request_id))


def _name(message: dict[str, Any], service_tier: str) -> None:
    message["id"] = _MESSAGE_ID + message["id"].removeprefix(_CHAT_ID)
    # Anthropic's answers always have these members.
    for member in ("stop_reason", "stop_sequence"):
        message.setdefault(member, None)
    usage = message["usage"]
    for member in ("cache_creation_input_tokens", "cache_read_input_tokens"):
        usage.setdefault(member, 0)
    usage["service_tier"] = _TIER_NAMES[service_tier]
