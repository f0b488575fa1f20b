"""The forms of streams, alone and behind the outermost layer."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import RequestState, api_error
from gateway.http import answer
from gateway.http.edge import Edge
from gateway.http.messages_form import MessagesForm
from gateway.http.stream_forms import CompletionForm, ResponsesForm, StreamForm, stream_form
from tests.harness.gateway.edge_app import FAILURE, Browser, application

PATH = "/v1/responses"


def typed(kind: str, number: int = 0, **fields: Any) -> str:
    value = {"type": f"response.{kind}", "sequence_number": number, **fields}
    return f"event: response.{kind}\ndata: {json.dumps(value)}"


def response(kind: str, number: int, status: str) -> str:
    return typed(kind, number, response={"status": status, "service_tier": "auto"})


CREATED = response("created", 0, "in_progress")
BEGUN = response("in_progress", 1, "in_progress")
DELTA = typed("output_text.delta", 2, delta="a")
COMPLETED = response("completed", 3, "completed")


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"]
    return events


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=Edge(application()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as made:
        yield made


def test_each_route_has_its_form() -> None:
    assert isinstance(stream_form(PATH), ResponsesForm)
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/none"):
        assert isinstance(stream_form(path), MessagesForm)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses/r", "/v1/messagesx", ""):
        assert isinstance(stream_form(path), CompletionForm)


@pytest.mark.parametrize("status", ["completed", "incomplete"])
async def test_the_last_event_says_how_the_response_ended(
    client: httpx.AsyncClient, status: str
) -> None:
    last = response("completed", 3, status)
    answered = await client.post(
        PATH, json={"events": [CREATED, BEGUN, DELTA, last], "service_tier": "flex"}
    )
    events = events_of(answered.text)
    assert [each["sequence_number"] for each in events] == [0, 1, 2, 3]
    assert events[-1]["type"] == f"response.{status}"
    tiers = [each["response"]["service_tier"] for each in events if "response" in each]
    assert tiers == ["flex"] * 3


async def test_a_refusal_behind_the_first_events_still_has_its_status(
    client: httpx.AsyncClient,
) -> None:
    answered = await client.post(PATH, json={"events": [CREATED, BEGUN, "fail"]})
    assert answered.status_code == 429
    assert answered.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([CREATED, BEGUN, DELTA], "internal_error"),
        ([CREATED, BEGUN, DELTA, "[DONE]"], "internal_error"),
        ([CREATED, BEGUN, DELTA, "raise"], "internal_error"),
        ([CREATED, BEGUN, DELTA, "fail"], FAILURE.code),
        ([CREATED, BEGUN, DELTA, "fail", COMPLETED], FAILURE.code),
    ],
)
async def test_a_response_without_its_end_ends_with_an_error_event(
    client: httpx.AsyncClient, events: list[str], code: str
) -> None:
    answered = await client.post(PATH, json={"events": events})
    assert answered.status_code == 200
    name, data = answered.text.removesuffix("\n\n").rpartition("\n\n")[2].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["code"]) == ("event: error", "error", code)
    assert set(error["error"]) == {"message", "type", "param", "code"}
    if "[DONE]" not in events:
        assert error["sequence_number"] == 3


@pytest.mark.parametrize("events", [[CREATED], [CREATED, BEGUN], [CREATED, "raise"], []])
async def test_a_response_that_never_began_is_a_plain_error(
    client: httpx.AsyncClient, events: list[str]
) -> None:
    answered = await client.post(PATH, json={"events": events})
    error = json.loads(answered.text.rpartition("data: ")[2])
    assert error["code" if answered.status_code == 200 else "error"]
    if events:
        assert answered.status_code == 500
        assert error["error"]["code"] == "internal_error"


async def test_a_silent_response_begins_with_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a comment must be sent the first events go out, and the stream goes on behind them."""
    monkeypatch.setattr(answer, "KEEP_ALIVE_S", 0.01)
    commented = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in (CREATED, BEGUN):
            body = f"{event}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await commented.wait()
        for event in (DELTA, COMPLETED):
            body = f"{event}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    browser = Browser({})
    work = asyncio.create_task(Edge(app)(browser.scope(PATH), browser.receive, browser.send))
    async with asyncio.timeout(20):
        while len(browser.sent) < 2:
            await asyncio.sleep(0.005)
        commented.set()
        await work
    text = b"".join(each.get("body", b"") for each in browser.sent[1:])
    first = browser.sent[1]["body"]
    assert first.endswith(answer.KEEP_ALIVE)
    events = events_of(text.replace(answer.KEEP_ALIVE, b"").decode())
    assert [each["sequence_number"] for each in events] == [0, 1, 2, 3]


@settings(deadline=None, max_examples=50)
@given(
    form=st.sampled_from([CompletionForm(), ResponsesForm()]),
    message=st.text(max_size=40),
    before=st.sampled_from([b"", b"data: [DONE]\n\n", f"{DELTA}\n\n".encode()]),
)
def test_an_error_event_is_one_event_and_no_success(
    form: StreamForm, message: str, before: bytes
) -> None:
    error = api_error("worker_lost", message)
    event = form.error_event(error, b"" if b"[DONE]" in before else before)
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
    told = json.loads(event.partition(b"data: ")[2])
    assert told["error"]["code"] == "worker_lost"
    assert isinstance(form, ResponsesForm) or not form.is_end(event)
    assert form.find_error(event, RequestState()) is None or isinstance(form, CompletionForm)


@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=60))
def test_what_a_client_wrote_is_never_taken_for_an_end(text: str) -> None:
    delta = json.dumps({"delta": text, "type": "response.output_text.delta"}, ensure_ascii=False)
    event = f"event: response.output_text.delta\ndata: {delta}\n\n".encode()
    assert not ResponsesForm().is_end(event)
    assert not ResponsesForm().is_preface(event)
    assert ResponsesForm().event(event, "flex", RequestState()) == event
