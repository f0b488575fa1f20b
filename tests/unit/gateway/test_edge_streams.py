"""Streams through the outermost layer: how they begin, go on and end."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, cast

import httpx
import pytest
from starlette.types import Message

from gateway.errors import RequestState, current_request
from gateway.http import answer
from gateway.http.edge import Edge, EdgeLimits
from gateway.http.stream_forms import STREAM_END
from tests.harness.gateway.edge_app import CHAT, FAILURE, Browser, application, error_of

KEEP_ALIVE_S = 0.03


@pytest.fixture
def gate() -> Edge:
    return Edge(application())


@pytest.fixture
async def client(gate: Edge) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


async def test_a_permit_is_held_until_the_last_byte() -> None:
    """A stream that has sent its status and some events is still a request."""
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": STREAM_END, "more_body": False})

    gate = Edge(app, limits=EdgeLimits(requests_max=1))
    browser = Browser({})
    work = asyncio.create_task(gate(browser.scope(CHAT), browser.receive, browser.send))
    while len(browser.sent) < 2:
        await asyncio.sleep(0)
    transport = httpx.ASGITransport(app=gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        response = await client.post(CHAT, json={})
        assert error_of(response) == (429, "queue_full")
        assert response.headers["retry-after"] in ("1", "2")
        assert not gate.idle.is_set()
        go_on.set()
        await work
        assert (await client.post(CHAT, json={})).status_code == 200
    assert gate.requests == 0
    assert gate.idle.is_set()


async def test_stream_passes_and_is_not_cached(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"events": ["1", "2", "[DONE]"]})
    assert response.text == "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


async def test_failure_before_the_first_event_is_an_http_error(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"events": ["fail", "[DONE]"]})
    assert error_of(response) == (429, "queue_full")
    assert response.json()["error"]["message"] == "Full."


async def test_failure_after_the_first_event_ends_the_stream(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"events": ["1", "fail", "[DONE]"]})
    assert response.status_code == 200
    assert response.text == f"data: 1\n\ndata: {FAILURE.body().decode()}\n\n"


@pytest.mark.parametrize("before", [[], ["1"]])
async def test_bug_in_a_stream_is_never_a_clean_end(
    client: httpx.AsyncClient, before: list[str]
) -> None:
    response = await client.post("/v1/completions", json={"events": [*before, "raise"]})
    last = response.text.rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "internal_error"
    assert response.status_code == (200 if before else 500)


async def test_client_that_does_not_read_is_given_up(
    gate: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "SEND_STALL_S", 0.05)
    browser = Browser({"events": ["1", "2"]}, reads=False)
    await gate(browser.scope("/v1/completions"), browser.receive, browser.send)
    assert [message["type"] for message in browser.sent] == ["http.response.start"]
    assert gate.requests == 0


async def test_client_that_leaves_before_its_body_came_costs_nothing(gate: Edge) -> None:
    async def gone() -> Message:
        return {"type": "http.disconnect"}

    browser = Browser({})
    await gate(browser.scope(CHAT), gone, browser.send)
    assert browser.sent == []
    assert gate.requests == 0


@pytest.mark.parametrize("events", [["1"], ["1", "2"], ["[DONE", "1"]])
async def test_stream_that_stops_without_its_end_ends_with_an_error(
    client: httpx.AsyncClient, events: list[str]
) -> None:
    """Whatever goes wrong behind, a client is never left with a short answer that looks whole."""
    response = await client.post("/v1/completions", json={"events": events})
    last = response.text.rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "internal_error"


async def test_silent_stream_is_kept_alive(gate: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as it is meant to be, however long the application takes."""
    monkeypatch.setattr(answer, "KEEP_ALIVE_S", KEEP_ALIVE_S)
    browser = Browser({})

    def kept_alive() -> int:
        return sum(message.get("body") == answer.KEEP_ALIVE for message in browser.sent)

    async def silence() -> None:
        count, began = kept_alive() + 2, time.monotonic()
        while kept_alive() < count:
            await asyncio.sleep(KEEP_ALIVE_S / 3)
        assert kept_alive() - count <= (time.monotonic() - began) / KEEP_ALIVE_S - 1

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await silence()
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await silence()
        await send({"type": "http.response.body", "body": STREAM_END, "more_body": False})

    await Edge(app)(browser.scope(CHAT), browser.receive, browser.send)
    await asyncio.sleep(2 * KEEP_ALIVE_S)
    assert [message["type"] for message in browser.sent].count("http.response.start") == 1
    assert browser.sent[0]["type"] == "http.response.start"
    bodies = [message["body"] for message in browser.sent[1:]]
    place = bodies.index(b"data: 1\n\n")
    assert place >= 2
    assert len(bodies) - place - 2 >= 2
    assert set(bodies) == {answer.KEEP_ALIVE, b"data: 1\n\n", STREAM_END}
    assert bodies[-1] == STREAM_END


async def test_status_line_waits_for_the_first_event(gate: Edge) -> None:
    """Until then nothing is sent, so that a failure can still have its status."""
    started = asyncio.Event()
    release = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        started.set()
        await release.wait()
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    browser = Browser({})
    work = asyncio.create_task(Edge(app)(browser.scope(CHAT), browser.receive, browser.send))
    await started.wait()
    assert browser.sent == []
    release.set()
    await work
    assert browser.sent[-1]["more_body"] is False


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    yield
    assert current_request.get() is None


async def test_a_stream_is_given_up_at_once_and_what_generates_it_ends() -> None:
    """Whether anyone waits for it or not: a client that does not read keeps nothing."""
    seen: list[RequestState] = []
    ends: list[str] = []

    async def generate() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: 1\n\n"
        finally:
            ends.append("generated")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = current_request.get()
        assert request is not None
        seen.append(request)
        stream = cast(AsyncGenerator[bytes, None], generate())
        request.streams.append(stream)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in stream:
            await send({"type": "http.response.body", "body": event, "more_body": True})

    class Stuck(Browser):
        async def send(self, message: Message) -> None:
            await super().send(message)
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

    gate, browser = Edge(app), Stuck({})
    work = asyncio.create_task(gate(browser.scope(CHAT), browser.receive, browser.send))
    while len(browser.sent) < 2:
        await asyncio.sleep(0)
    assert ends == []
    give_up = seen[0].give_up
    assert give_up is not None
    give_up()
    await work
    assert ends == ["generated"]
    assert seen[0].streams == []
    assert gate.idle.is_set()
    give_up()


EVENT: Message = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}


async def test_a_send_that_ends_at_once_needs_no_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(_: float) -> Any:
        raise AssertionError("each token would pay for a timer")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    monkeypatch.setattr(asyncio, "timeout", never)
    one = answer.Answer(send, "r")
    for _ in range(3):
        await one._out(EVENT)
    assert sent == [EVENT] * 3


async def test_a_send_that_waits_goes_on_where_it_waited() -> None:
    go_on, steps = asyncio.Event(), []

    async def send(_: Message) -> None:
        await asyncio.sleep(0)
        steps.append("began")
        await go_on.wait()
        await asyncio.sleep(0)
        steps.append("ended")

    work = asyncio.create_task(answer.Answer(send, "r")._out(EVENT))
    while not steps:
        await asyncio.sleep(0)
    assert not work.done()
    go_on.set()
    await work
    assert steps == ["began", "ended"]


async def test_a_send_fails_or_is_cancelled_where_it_waits() -> None:
    ends: list[str] = []

    async def breaks(_: Message) -> None:
        await asyncio.sleep(0)
        raise OSError("the connection is gone")

    async def waits(_: Message) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    with pytest.raises(OSError, match="is gone"):
        await answer.Answer(breaks, "r")._out(EVENT)
    work = asyncio.create_task(answer.Answer(waits, "r")._out(EVENT))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert ends == ["cancelled"]


async def test_a_send_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "SEND_STALL_S", 0.01)

    async def send(_: Message) -> None:
        await asyncio.Event().wait()

    one = answer.Answer(send, "r")
    with pytest.raises(answer.ClientStalledError):
        await one._out(EVENT)
    with pytest.raises(answer.ClientStalledError):
        await one.send(EVENT)
