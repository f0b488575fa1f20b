"""What the answers of each API look like: how streams begin, name their tier, fail and end.

Chat and text completions end with `[DONE]` and fail with a bare `error` object. The Responses API
has typed events. Two of them precede the first token, and the response's status names the last one.
Its `error` event has its fields both where OpenAI's schema and where OpenAI's clients expect them.
The Messages API has a form of its own. An event is one message of vLLM's. Pure.
"""

from typing import Any, Final, Protocol

import msgspec

from gateway.admission.tiers import VLLM_SERVICE_TIERS
from gateway.errors import ApiError, RequestState, failed_event
from gateway.http.messages_form import MessagesForm, is_messages_path
from gateway.http.typed_events import DATA, fields_of, typed

OPENAI_VERSION: Final = b"2020-10-01"
"""The version of OpenAI's API that answers follow."""

RESPONSES_PATH: Final = "/v1/responses"

STREAM_END: Final = b"data: [DONE]\n\n"
_ERROR_EVENT = b'data: {"error"'
_NO_TIER = b'"service_tier":null'
_CHUNK_EVENT = b"data: {"

_PREFACE: Final = (b"event: response.created\n", b"event: response.in_progress\n")
_COMPLETED = b"event: response.completed\n"
_ENDS: Final = (_COMPLETED, b"event: response.incomplete\n", b"event: error\n")
_WITH_RESPONSE: Final = (*_PREFACE, _COMPLETED)
_ITEM_DONE = b"event: response.output_item.done\n"


class StreamForm(Protocol):
    """How one API streams."""

    always_names_tier: bool
    """Whether answers name the tier even if the request's body did not."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that every answer of this API has."""

    def is_preface(self, event: bytes) -> bool:
        """Return whether an event precedes all tokens, so that the request may still be refused."""

    def find_error(self, event: bytes, state: RequestState) -> ApiError | None:
        """Return the error if the event is one."""

    def is_end(self, event: bytes) -> bool:
        """Return whether a stream that ends with this event is complete."""

    def event(self, event: bytes, service_tier: str, state: RequestState) -> bytes:
        """Return an event as the client gets it; an empty tier is not named."""

    def whole(self, body: bytes, service_tier: str) -> bytes:
        """Return the body of an answer that is not streamed, with its tier."""

    def error_event(self, error: ApiError, last: bytes) -> bytes:
        """Return the event that ends a stream after `last`, its last event, if any."""

    def error_body(self, error: ApiError) -> bytes:
        """Return the body of an answer that is an error."""


class _OpenAIForm:
    """What OpenAI's APIs have in common."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the version of the API."""
        return [(b"openai-version", OPENAI_VERSION)]

    def error_body(self, error: ApiError) -> bytes:
        """Return the error as an object of its own."""
        return error.body()


class CompletionForm(_OpenAIForm):
    """Chat and text completions, and every other stream."""

    always_names_tier = False

    def is_preface(self, event: bytes) -> bool:  # noqa: ARG002
        """Return False: the first event holds a token, or at least a role."""
        return False

    def find_error(self, event: bytes, state: RequestState) -> ApiError | None:
        """Return vLLM's error as ours."""
        return failed_event(event, state.failure) if event.startswith(_ERROR_EVENT) else None

    def is_end(self, event: bytes) -> bool:
        """Return whether the event ends with `[DONE]`."""
        return event.endswith(STREAM_END)

    def event(self, event: bytes, service_tier: str, state: RequestState) -> bytes:  # noqa: ARG002
        """Put the tier into a chunk."""
        if not service_tier or not event.startswith(_CHUNK_EVENT):
            return event
        return _with_tier(_CHUNK_EVENT, event, service_tier)

    def whole(self, body: bytes, service_tier: str) -> bytes:
        """Put the tier into the object."""
        return _with_tier(b"{", body, service_tier) if body.startswith(b"{") else body

    def error_event(self, error: ApiError, last: bytes) -> bytes:  # noqa: ARG002
        """Return the error as a separate chunk."""
        return b"data: " + error.body() + b"\n\n"


class ResponsesForm(_OpenAIForm):
    """The Responses API."""

    always_names_tier = True

    def is_preface(self, event: bytes) -> bool:
        """Return whether the event only confirms that the response was accepted."""
        return event.startswith(_PREFACE)

    def find_error(self, event: bytes, state: RequestState) -> ApiError | None:  # noqa: ARG002
        """Return the task's failure, for which vLLM has no event."""
        return state.failure

    def is_end(self, event: bytes) -> bool:
        """Return whether the event completes the response or reports its error."""
        return event.startswith(_ENDS)

    def event(self, event: bytes, service_tier: str, state: RequestState) -> bytes:
        """Name the tier; name the last item and the last event of an incomplete response so."""
        if event.startswith(_ITEM_DONE) and "length" in state.finish_reasons:
            fields = fields_of(event)
            _mark_incomplete(fields["item"])
            return typed(fields)
        if not event.startswith(_WITH_RESPONSE):
            return event
        fields = fields_of(event)
        response = fields["response"]
        response["service_tier"] = service_tier
        if response.get("status") == "incomplete":
            fields["type"] = "response.incomplete"
            _mark_last_item(response)
        return typed(fields)

    def whole(self, body: bytes, service_tier: str) -> bytes:
        """Name the tier that answered; mark the last item of an incomplete response."""
        response = msgspec.json.decode(body)
        if isinstance(response, dict) and response.get("service_tier") in VLLM_SERVICE_TIERS:
            response["service_tier"] = service_tier
        if isinstance(response, dict) and response.get("status") == "incomplete":
            _mark_last_item(response)
        return msgspec.json.encode(response)

    def error_event(self, error: ApiError, last: bytes) -> bytes:
        """Return an `error` event; OpenAI's clients raise for its nested object."""
        number = fields_of(last).get("sequence_number", -1) if DATA in last else -1
        fields = {"message": error.message, "param": error.param, "code": error.code}
        nested = {**fields, "type": error.type}
        return typed({"type": "error", "sequence_number": number + 1, **fields, "error": nested})


_COMPLETION, _RESPONSES = CompletionForm(), ResponsesForm()


def stream_form(path: str, request_id: str = "") -> StreamForm:
    """Return how the route at a path answers a request."""
    if is_messages_path(path):
        return MessagesForm(request_id)
    return _RESPONSES if path == RESPONSES_PATH else _COMPLETION


def _mark_last_item(response: dict[str, Any]) -> None:
    """Mark the item that the limit on tokens broke off; vLLM says that it is complete."""
    for item in response.get("output", [])[-1:]:
        _mark_incomplete(item)


def _mark_incomplete(item: dict[str, Any]) -> None:
    if item.get("status") == "completed":
        item["status"] = "incomplete"


def _with_tier(prefix: bytes, body: bytes, service_tier: str) -> bytes:
    field = b'"service_tier":"%s"' % service_tier.encode()
    if _NO_TIER in body:
        # In a string these quotes would be escaped.
        return body.replace(_NO_TIER, field, 1)
    return prefix + field + b"," + body[len(prefix) :]
