"""The outermost layer around small applications: what passes, what is refused, what goes out."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from gateway import answer, edge, intake
from gateway.answer import STREAM_END
from gateway.edge import Edge, EdgeLimits
from gateway.errors import api_error, current_request

CHAT = "/v1/chat/completions"
FAILURE = api_error("queue_full", "Full.")


class Broken(Exception):
    pass


async def echo(request: Request) -> Response:
    """Tell what reached the application."""
    body = await request.body()
    return JSONResponse({"headers": dict(request.headers), "body": body.decode()})


async def stream(request: Request) -> Response:
    """Send what the body says; `fail` notes a task's failure, `raise` is a bug."""

    items = json.loads(await request.body())["events"]

    async def events() -> AsyncIterator[str]:
        for item in items:
            if item == "fail":
                state = current_request.get()
                assert state is not None
                state.failure = FAILURE
                yield 'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
            elif item == "raise":
                raise Broken
            else:
                yield f"data: {item}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def tokenize(request: Request) -> Response:
    """Answer as the body says."""
    asked = json.loads(await request.body())
    if asked.get("raise"):
        raise Broken
    return JSONResponse(asked["answer"], status_code=asked["status"])


def application() -> Starlette:
    routes = [
        Route(CHAT, echo, methods=["POST"]),
        Route("/v1/completions", stream, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/version", echo, methods=["GET"]),
        Route("/metrics", echo, methods=["GET"]),
    ]
    return Starlette(routes=routes)


@pytest.fixture
def gate() -> Edge:
    return Edge(application())


@pytest.fixture
async def client(gate: Edge) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


def error_of(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    assert response.headers["x-request-id"]
    assert response.headers["x-priority-tier"]
    return response.status_code, error["code"]


@pytest.mark.parametrize(
    ("method", "path", "refusal"),
    [
        ("GET", "/metrics", (404, "unknown_url")),
        ("GET", "/", (404, "unknown_url")),
        ("POST", "/v1/models", (405, "method_not_allowed")),
        ("GET", CHAT, (405, "method_not_allowed")),
        ("GET", CHAT + "/", (404, "unknown_url")),
        ("GET", "//v1/models", (404, "unknown_url")),
        ("DELETE", "/v1/models/x", (405, "method_not_allowed")),
    ],
)
async def test_only_listed_routes_exist(
    client: httpx.AsyncClient, method: str, path: str, refusal: tuple[int, str]
) -> None:
    assert error_of(await client.request(method, path)) == refusal


@pytest.mark.parametrize(
    ("headers", "body", "priority", "tier"),
    [
        ({}, {}, "0", "standard"),
        ({"X-Priority-Tier": "interactive"}, {}, "-10", "interactive"),
        ({"X-Priority-Tier": "Batch"}, {"service_tier": "priority"}, "10", "batch"),
        ({}, {"service_tier": "flex"}, "10", "batch"),
        ({"X-Vllm-Priority": "-99"}, {"priority": -99}, "0", "standard"),
    ],
)
async def test_tier_reaches_vllm_and_comes_back(
    client: httpx.AsyncClient,
    headers: dict[str, str],
    body: dict[str, Any],
    priority: str,
    tier: str,
) -> None:
    response = await client.post(CHAT, json=body, headers=headers)
    assert response.json()["headers"]["x-vllm-priority"] == priority
    assert response.headers.get_list("x-priority-tier") == [tier]


async def test_unknown_tier_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={}, headers={"X-Priority-Tier": "royal"})
    assert error_of(response) == (400, "invalid_value")


async def test_headers_that_steer_vllm_are_taken_away(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={}, headers={"X-data-parallel-rank": "7"})
    assert "x-data-parallel-rank" not in response.json()["headers"]


@pytest.mark.parametrize("wanted", ["abc-1.2:3_x", "A" * 128])
async def test_request_id_of_the_client_is_kept(client: httpx.AsyncClient, wanted: str) -> None:
    response = await client.post(CHAT, json={}, headers={"X-Request-Id": wanted})
    assert response.headers.get_list("x-request-id") == [wanted]
    assert response.json()["headers"]["x-request-id"] == wanted


@pytest.mark.parametrize("wanted", ["", "a b", "A" * 129, "../x", "ä", "<script>"])
async def test_unfit_request_id_is_replaced(client: httpx.AsyncClient, wanted: str) -> None:
    headers = {b"X-Request-Id": wanted.encode()}
    response = await client.get("/version", headers=headers)
    assert len(response.headers["x-request-id"]) == 32


async def test_other_content_types_are_refused(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert error_of(response) == (415, "unsupported_media_type")


@pytest.mark.parametrize("told", [True, False])
async def test_large_body_is_refused(gate: Edge, client: httpx.AsyncClient, told: bool) -> None:
    gate._limits = EdgeLimits(body_bytes_max=100)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"          "

    content: Any = b" " * 101 if told else chunks()
    response = await client.post(
        CHAT, content=content, headers={"content-type": "application/json"}
    )
    assert error_of(response) == (413, "request_too_large")
    assert response.headers["x-should-retry"] == "false"


async def test_body_that_does_not_come_is_not_waited_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "BODY_GRACE_S", 0.05)
    monkeypatch.setattr(intake, "BODY_WAIT_S", 0.05)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    response = await client.post(CHAT, content=slow(), headers={"content-type": "application/json"})
    assert error_of(response) == (408, "request_timeout")


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


async def test_draining_refuses_new_requests(gate: Edge, client: httpx.AsyncClient) -> None:
    gate.draining = True
    assert error_of(await client.post(CHAT, json={})) == (503, "draining")


async def test_refused_clients_do_not_come_back_together(gate: Edge) -> None:
    gate.draining = True
    error = api_error("draining", "Bye.", retry_after_s=40)
    waits = {edge._with_jitter(error).retry_after_s for _ in range(100)}
    assert len(waits) > 5
    assert min(waits) >= 40
    assert max(waits) <= 60


async def test_errors_of_the_application_are_shaped(client: httpx.AsyncClient) -> None:
    body = {"error": {"message": "The model `x` does not exist.", "param": "model", "code": 404}}
    response = await client.post("/tokenize", json={"status": 404, "answer": body})
    assert error_of(response) == (404, "model_not_found")


async def test_bug_is_a_500_that_tells_nothing(client: httpx.AsyncClient) -> None:
    response = await client.post("/tokenize", json={"raise": True})
    assert error_of(response) == (500, "internal_error")
    assert "Broken" not in response.text


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
    assert response.text == "data: 1\n\n" + FAILURE.event().decode()


@pytest.mark.parametrize("before", [[], ["1"]])
async def test_bug_in_a_stream_is_never_a_clean_end(
    client: httpx.AsyncClient, before: list[str]
) -> None:
    response = await client.post("/v1/completions", json={"events": [*before, "raise"]})
    last = response.text.rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "internal_error"
    assert response.status_code == (200 if before else 500)


class Browser:
    """An ASGI server's side of one request, under the test's control."""

    def __init__(self, body: dict[str, Any], *, reads: bool = True) -> None:
        self.sent: list[Message] = []
        self._body = json.dumps(body).encode()
        self._asked = 0
        self._reads = reads

    async def receive(self) -> Message:
        self._asked += 1
        if self._asked == 1:
            return {"type": "http.request", "body": self._body, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if not self._reads:
            await asyncio.Event().wait()

    def scope(self, path: str) -> dict[str, Any]:
        headers = [(b"content-type", b"application/json"), (b"host", b"gateway")]
        return {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }


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


async def test_service_tier_is_echoed_where_it_was_asked_for(client: httpx.AsyncClient) -> None:
    body = {"status": 200, "answer": {"id": "x"}, "service_tier": "fast"}
    response = await client.post("/tokenize", json=body)
    assert response.json() == {"service_tier": "priority", "id": "x"}
    assert int(response.headers["content-length"]) == len(response.content)
    assert (await client.post("/tokenize", json={**body, "service_tier": None})).json() == {
        "id": "x"
    }
    text = json.dumps({"text": '"service_tier":null', "service_tier": None}, separators=(",", ":"))
    response = await client.post("/tokenize", json={**body, "answer": json.loads(text)})
    assert response.json() == {"text": '"service_tier":null', "service_tier": "priority"}
    events = ['{"id": "a"}', '{"id": "b"}', "[DONE]"]
    response = await client.post("/v1/completions", json={"events": events, "service_tier": "flex"})
    first, second, end, _ = response.text.split("\n\n")
    assert json.loads(first[6:]) == {"service_tier": "flex", "id": "a"}
    assert json.loads(second[6:]) == {"service_tier": "flex", "id": "b"}
    assert end == "data: [DONE]"


async def test_every_answer_has_openai_s_headers(client: httpx.AsyncClient) -> None:
    for response in (
        await client.get("/version"),
        await client.get("/nothing"),
        await client.post(CHAT, json={}),
        await client.post("/v1/completions", json={"events": ["[DONE]"]}),
    ):
        assert response.headers["openai-version"] == "2020-10-01"
        assert int(response.headers["openai-processing-ms"]) >= 0
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("value", ["-1", "soon", "1e3", "9" * 30, "86400001"])
async def test_bad_deadline_is_refused(client: httpx.AsyncClient, value: str) -> None:
    response = await client.post(CHAT, json={}, headers={"X-Request-Deadline-Ms": value})
    assert error_of(response) == (400, "invalid_value")


@pytest.mark.parametrize(
    "header", ["Content-Type", "X-Priority-Tier", "Authorization", "X-Request-Id"]
)
async def test_header_that_may_come_once_is_refused_twice(
    client: httpx.AsyncClient, header: str
) -> None:
    headers = [(header, "batch"), (header.lower(), "interactive")]
    response = await client.post(CHAT, content=b"{}", headers=headers)
    assert error_of(response) == (400, "invalid_http")


async def test_internal_headers_of_clients_are_taken_away(client: httpx.AsyncClient) -> None:
    spoofed = {
        "X-Vllm-Foo": "1",
        "X-Aileron-Tenant": "admin",
        "X-Gateway-Inference-Fairness-Id": "other",
        "X-Data-Parallel-Rank": "3",
        "Authorization": "Bearer sk-secret",
        "Proxy-Authorization": "x",
        "Upgrade": "h2c",
    }
    response = await client.post(CHAT, json={}, headers=spoofed)
    seen = set(response.json()["headers"])
    assert not seen & {name.lower() for name in spoofed}


async def test_silent_stream_is_kept_alive(gate: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "KEEP_ALIVE_S", 0.03)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": STREAM_END, "more_body": False})

    browser = Browser({})
    await Edge(app)(browser.scope(CHAT), browser.receive, browser.send)
    await asyncio.sleep(0.05)
    assert [message["type"] for message in browser.sent].count("http.response.start") == 1
    assert browser.sent[0]["type"] == "http.response.start"
    bodies = [message["body"] for message in browser.sent[1:]]
    place = bodies.index(b"data: 1\n\n")
    assert 2 <= place <= 3
    assert 2 <= len(bodies) - place - 2 <= 3
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


async def test_websockets_are_closed(gate: Edge) -> None:
    browser = Browser({})
    await gate({"type": "websocket", "path": "/v1/realtime"}, browser.receive, browser.send)
    assert browser.sent == [{"type": "websocket.close", "code": 1000}]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    yield
    assert current_request.get() is None
