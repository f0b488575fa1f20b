"""How answers of Anthropic's Messages API look, alone and behind the outermost layer."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route

from gateway.errors import CODES, RequestState, api_error
from gateway.http.edge import Edge
from gateway.http.messages_form import MessagesForm, may_hold_key, messages_error
from tests.harness.gateway.edge_app import FAILURE, stream

PATH = "/v1/messages"
TYPES = {
    *("invalid_request_error", "authentication_error", "permission_error", "not_found_error"),
    *("request_too_large", "rate_limit_error", "api_error", "overloaded_error", "timeout_error"),
}
MESSAGE: dict[str, Any] = {
    "id": "chatcmpl-1",
    "type": "message",
    "usage": {"input_tokens": 9, "output_tokens": 0},
}


@pytest.mark.parametrize(
    ("method", "path", "may"),
    [
        ("POST", PATH, True),
        ("POST", f"{PATH}/count_tokens", True),
        ("GET", "/v1/models", True),
        ("HEAD", "/v1/models", True),
        ("GET", "/v1/models/org/name", True),
        ("POST", "/v1/models", False),
        ("GET", "/v1/modelsx", False),
        ("GET", "/v1/files", False),
        ("POST", "/v1/chat/completions", False),
    ],
)
def test_where_anthropic_s_clients_send_their_key(method: str, path: str, may: bool) -> None:
    assert may_hold_key(method, path) is may


def event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}"


START = event("message_start", message=MESSAGE)
DELTA = event("content_block_delta", delta={"type": "text_delta", "text": "a"}, index=0)
STOP = event("message_stop")
ERROR = event("error", error={"type": "internal_error", "message": "pydantic says no"})


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=[Route(PATH, stream, methods=["POST"])])
    transport = httpx.ASGITransport(app=Edge(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as made:
        yield made


def last_of(answer: httpx.Response) -> dict[str, Any]:
    """The last event, whose name is its type."""
    name, data = answer.text.removesuffix("\n\n").rpartition("\n\n")[2].split("\n")
    fields: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {fields['type']}"
    return fields


@pytest.mark.parametrize("code", CODES)
def test_each_error_has_a_type_of_the_api(code: str) -> None:
    fields = messages_error(api_error(code, "It failed."), "r")
    assert fields["error"]["type"] in TYPES
    assert fields["request_id"] == "r"
    status = CODES[code][0]
    assert (fields["error"]["type"] in ("api_error", "overloaded_error", "timeout_error")) == (
        status >= 500
    )


def test_an_error_names_its_parameter() -> None:
    for text, named in (
        ("Too large.", "top_k: Too large."),
        ("Top_k is large.", "Top_k is large."),
    ):
        assert messages_error(api_error("invalid_value", text, "top_k"), "")["error"] == {
            "type": "invalid_request_error",
            "message": named,
        }


async def test_a_whole_stream_passes(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json={"events": [START, DELTA, STOP]})
    assert answer.status_code == 200
    assert last_of(answer)["type"] == "message_stop"
    first = json.loads(answer.text.partition("data: ")[2].partition("\n")[0])["message"]
    assert first["id"] == "msg_1"
    assert first["usage"] == {
        **MESSAGE["usage"],
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "service_tier": "standard",
    }


@pytest.mark.parametrize("events", [["fail"], [START, "fail"], [START, ERROR], [START, "raise"]])
async def test_a_failure_before_the_text_has_its_status(
    client: httpx.AsyncClient, events: list[str]
) -> None:
    answer = await client.post(PATH, json={"events": events})
    status, kind = (FAILURE.status, "rate_limit_error") if "fail" in events else (500, "api_error")
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind
    assert answer.json()["request_id"] == answer.headers["request-id"]
    assert "pydantic" not in answer.text


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([START, DELTA], "api_error"),
        ([START, DELTA, "[DONE]"], "api_error"),
        ([START, DELTA, "raise"], "api_error"),
        ([START, DELTA, ERROR], "api_error"),
        ([START, DELTA, ERROR, STOP], "api_error"),
        ([START, DELTA, "fail"], "rate_limit_error"),
        ([START, DELTA, "fail", STOP], "rate_limit_error"),
    ],
)
async def test_a_stream_without_its_end_ends_with_an_error(
    client: httpx.AsyncClient, events: list[str], kind: str
) -> None:
    answer = await client.post(PATH, json={"events": events})
    assert answer.status_code == 200
    last = last_of(answer)
    assert (last["type"], last["error"]["type"]) == ("error", kind)
    assert last["request_id"] == answer.headers["request-id"]
    assert answer.text.count("event: error") == 1
    assert "message_stop" not in answer.text
    assert "pydantic" not in answer.text


def test_cached_tokens_are_named_once() -> None:
    """Also where vLLM names them itself."""
    state = RequestState()
    state.cached_tokens = 4
    form = MessagesForm("r")
    for usage in ({"input_tokens": 9}, {"input_tokens": 5, "cache_read_input_tokens": 4}):
        start = event("message_start", message={**MESSAGE, "usage": usage})
        fields = json.loads(form.event(start.encode(), "flex", state).partition(b"data: ")[2])
        assert fields["message"]["usage"]["input_tokens"] == 5
        assert fields["message"]["usage"]["cache_read_input_tokens"] == 4
        assert fields["message"]["usage"]["service_tier"] == "batch"


def test_a_count_of_tokens_is_left_as_it_is() -> None:
    body = b'{"input_tokens": 3}'
    assert MessagesForm("r").whole(body, "default") == body


@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=60))
def test_what_a_model_wrote_is_never_taken_for_an_end(text: str) -> None:
    form, state = MessagesForm("r"), RequestState()
    delta = {"type": "text_delta", "text": text}
    sent = event("content_block_delta", delta=delta, index=0).encode() + b"\n\n"
    assert not form.is_end(sent)
    assert not form.is_preface(sent)
    assert form.find_error(sent, state) is None
    assert form.event(sent, "default", state) == sent


@settings(deadline=None, max_examples=50)
@given(message=st.text(max_size=40))
def test_an_error_event_is_one_event(message: str) -> None:
    sent = MessagesForm("r").error_event(api_error("worker_lost", message), b"")
    assert sent.endswith(b"\n\n")
    assert sent.count(b"\n\n") == 1
    assert sent.startswith(b"event: error\ndata: {")
