"""The same request with the same key gets the same answer."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.admission import idempotency
from gateway.admission.idempotency import (
    IN_PROGRESS,
    RETENTION_S,
    IdempotencyCache,
    StoredAnswer,
)
from gateway.errors import ApiError
from gateway.http import edge
from gateway.http.edge import Edge
from tests.harness.gateway.edge_app import CHAT, error_of

ANSWER = StoredAnswer(200, [], b"x" * 10)


class Counter:
    """An application that counts what it answers."""

    def __init__(self) -> None:
        self.answered = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def answer(self, request: Request) -> Response:
        asked = await request.json()
        self.answered += 1
        number = self.answered
        await self.go_on.wait()
        if asked.get("stream"):
            events = iter([f"data: {number}\n\n", "data: [DONE]\n\n"])
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse({"number": number}, status_code=asked.get("seed", 200))


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
async def client(counter: Counter) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=[Route(CHAT, counter.answer, methods=["POST"])])
    transport = httpx.ASGITransport(app=Edge(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as made:
        yield made


def named(key: str, tenant: str = "t") -> dict[str, str]:
    return {"idempotency-key": key, "x-gateway-inference-fairness-id": tenant}


async def test_an_answer_comes_back_as_it_was(client: httpx.AsyncClient) -> None:
    first = await client.post(CHAT, json={"n": 1}, headers=named("a"))
    again = await client.post(CHAT, json={"n": 1}, headers=named("a"))
    assert (first.status_code, first.content) == (again.status_code, again.content)
    assert again.headers["content-type"] == "application/json"
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert first.headers["x-request-id"] != again.headers["x-request-id"]
    for headers in (named("b"), named("a", "other"), {}):
        other = await client.post(CHAT, json={"n": 1}, headers=headers)
        assert other.content != first.content


async def test_another_request_with_the_same_key_is_refused(client: httpx.AsyncClient) -> None:
    await client.post(CHAT, json={"n": 1}, headers=named("a"))
    other = await client.post(CHAT, json={"n": 2}, headers=named("a"))
    assert error_of(other) == (400, "invalid_value")
    long = await client.post(CHAT, json={}, headers=named("a" * 256))
    assert error_of(long) == (400, "invalid_value")


async def test_a_request_waits_for_an_equal_one(
    client: httpx.AsyncClient, counter: Counter
) -> None:
    counter.go_on.clear()
    first = asyncio.create_task(client.post(CHAT, json={}, headers=named("a")))
    while not counter.answered:
        await asyncio.sleep(0)
    second = asyncio.create_task(client.post(CHAT, json={}, headers=named("a")))
    await asyncio.sleep(0.2)
    assert not second.done()
    counter.go_on.set()
    assert (await second).content == (await first).content
    assert (await second).headers["idempotent-replayed"] == "true"
    assert counter.answered == 1


async def test_a_request_does_not_wait_for_ever(
    client: httpx.AsyncClient, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "SAME_REQUEST_WAIT_S", 0.2)
    counter.go_on.clear()
    first = asyncio.create_task(client.post(CHAT, json={}, headers=named("a")))
    while not counter.answered:
        await asyncio.sleep(0)
    second = await client.post(CHAT, json={}, headers=named("a"))
    assert error_of(second) == (409, IN_PROGRESS)
    assert second.headers["retry-after"] == "1"
    assert "x-should-retry" not in second.headers
    counter.go_on.set()
    assert (await first).status_code == 200


@pytest.mark.parametrize("body", [{"seed": 400}, {"seed": 503}, {"stream": True}])
async def test_errors_and_streams_are_not_kept(
    client: httpx.AsyncClient, counter: Counter, body: dict[str, object]
) -> None:
    for _ in range(2):
        await client.post(CHAT, json=body, headers=named("a"))
    assert counter.answered == 2


def test_answers_are_forgotten_after_a_day() -> None:
    kept = IdempotencyCache()
    assert kept.begin("t", "a", b"r", 0.0) is None
    assert isinstance(kept.begin("t", "a", b"r", 1.0), ApiError)
    kept.end("t", "a", ANSWER)
    assert kept.begin("t", "a", b"r", RETENTION_S - 1.0) == ANSWER
    assert kept.begin("t", "a", b"r", RETENTION_S) is None


def test_not_more_is_kept_than_bearable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "BYTES_MAX", 25)
    monkeypatch.setattr(idempotency, "ANSWER_BYTES_MAX", 15)
    kept = IdempotencyCache()
    assert kept.begin("t", "running", b"r", 0.0) is None
    for key in "abc":
        assert kept.begin("t", key, b"r", 0.0) is None
        kept.end("t", key, ANSWER)
    assert kept.begin("t", "a", b"r", 0.0) is None, "the oldest has gone"
    kept.end("t", "a", None)
    assert kept.begin("t", "c", b"r", 0.0) == ANSWER
    assert isinstance(kept.begin("t", "running", b"r", 0.0), ApiError), "what runs is not forgotten"
    assert kept.begin("t", "large", b"r", 0.0) is None
    kept.end("t", "large", StoredAnswer(200, [], b"x" * 16))
    assert kept.begin("t", "large", b"r", 0.0) is None


async def test_few_requests_of_a_tenant_wait(
    client: httpx.AsyncClient, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "SAME_REQUESTS_MAX", 1)
    counter.go_on.clear()
    first = asyncio.create_task(client.post(CHAT, json={}, headers=named("a")))
    while not counter.answered:
        await asyncio.sleep(0)
    second = asyncio.create_task(client.post(CHAT, json={}, headers=named("a")))
    await asyncio.sleep(0.05)
    third = await client.post(CHAT, json={}, headers=named("a"))
    assert error_of(third) == (409, IN_PROGRESS)
    counter.go_on.set()
    assert (await first).content == (await second).content
