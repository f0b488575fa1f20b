"""The outermost layer around a small application: what passes, what is refused."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.protocol.keys import ApiKey, dump_key, hash_of
from coordinator.protocol.metrics_wire import CLIENT_RETRIES, TIER_CLAMPED
from gateway.admission.keyring import KeyRing
from gateway.errors import current_request
from gateway.http import intake
from gateway.http.edge import Edge, EdgeLimits
from gateway.http.line_call import LineCall
from gateway.telemetry.meter import RequestMeter
from tests.harness.gateway.edge_app import CHAT, Browser, application, error_of


@pytest.fixture
def gate() -> Edge:
    return Edge(application())


@pytest.fixture
async def client(gate: Edge) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


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
    assert re.fullmatch(f"{re.escape(wanted)}-[0-9a-f]{{12}}", named_in(response))


async def test_answers_to_equal_request_ids_have_ids_of_their_own(
    client: httpx.AsyncClient,
) -> None:
    headers = {"X-Request-Id": "same"}
    answers = [await client.post(CHAT, json={}, headers=headers) for _ in range(2)]
    assert len({named_in(each) for each in answers}) == 2


def named_in(response: httpx.Response) -> str:
    """Return the request id that the application got: it names the answer's object by it."""
    return str(response.json()["headers"]["x-request-id"])


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


@pytest.mark.parametrize(("size", "status"), [(100, 200), (101, 413)])
async def test_large_line_of_a_batch_is_refused(gate: Edge, size: int, status: int) -> None:
    gate._limits = EdgeLimits(body_bytes_max=100)
    answer = await gate.answer_line(LineCall(CHAT, b"{}".ljust(size), "tenant", 60_000))
    assert answer.status == status


async def test_a_line_of_a_batch_needs_the_key_that_made_it_and_its_budget(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    revoked = datetime(2026, 1, 1, tzinfo=UTC)
    keys = {
        "small": ApiKey(hash=hash_of("small"), tenant="t", tokens_per_day=100),
        "minute": ApiKey(hash=hash_of("minute"), tenant="t", requests_per_minute=1),
        "gone": ApiKey(hash=hash_of("gone"), tenant="t", revoked=revoked),
        "old": ApiKey(hash=hash_of("old"), tenant="t", expires=revoked),
        "absent": ApiKey(hash=hash_of("absent"), tenant="t"),
    }
    file.write_text("keys:\n" + "".join(dump_key(keys[name]) for name in [*keys][:-1]))
    gate = Edge(application(), KeyRing(str(file)))

    async def codes(name: str, times: int) -> list[str]:
        key_id = keys[name].id if name else ""
        call = LineCall(CHAT, b"{}".ljust(160), "t", 60_000, key_id)
        answers = [await gate.answer_line(call) for _ in range(times)]
        return [
            "" if each.status == 200 else json.loads(each.body)["error"]["code"] for each in answers
        ]

    assert await codes("small", 3) == ["", "", "token_budget_exceeded"], "40 tokens each"
    assert await codes("minute", 3) == [""] * 3, "minutes do not count for batches"
    assert await codes("", 1) == [""], "made before there were keys"
    assert await codes("gone", 1) == await codes("absent", 1) == ["api_key_revoked"]
    assert await codes("old", 1) == ["api_key_expired"]
    assert len(gate._admission) == 0
    without_keys = Edge(application())
    call = LineCall(CHAT, b"{}", "t", 60_000, keys["gone"].id)
    assert (await without_keys.answer_line(call)).status == 200


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


async def test_draining_refuses_new_requests(gate: Edge, client: httpx.AsyncClient) -> None:
    gate.draining = True
    assert error_of(await client.post(CHAT, json={})) == (503, "draining")


async def test_a_file_that_is_being_read_is_an_open_request() -> None:
    """A process that ends waits for it; probes it does not wait for."""
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"a line", "more_body": False})

    gate = Edge(app)
    for path, is_counted in (("/v1/files/file-1/content", True), ("/ready", False)):
        go_on.clear()
        browser = Browser({})
        scope = {**browser.scope(path), "method": "GET"}
        work = asyncio.create_task(gate(scope, browser.receive, browser.send))
        await asyncio.sleep(0.01)
        assert (gate.requests, gate.idle.is_set()) == (int(is_counted), not is_counted)
        go_on.set()
        await work
        assert gate.idle.is_set()


async def test_errors_of_the_application_are_shaped(client: httpx.AsyncClient) -> None:
    body = {"error": {"message": "The model `x` does not exist.", "param": "model", "code": 404}}
    response = await client.post("/tokenize", json={"status": 404, "answer": body})
    assert error_of(response) == (404, "model_not_found")


async def test_bug_is_a_500_that_tells_nothing(client: httpx.AsyncClient) -> None:
    response = await client.post("/tokenize", json={"raise": True})
    assert error_of(response) == (500, "internal_error")
    assert "Broken" not in response.text


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
        assert "x-queue-wait-ms" not in response.headers, "nothing of these has waited for a group"


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


async def test_websockets_are_closed(gate: Edge) -> None:
    browser = Browser({})
    await gate({"type": "websocket", "path": "/v1/realtime"}, browser.receive, browser.send)
    assert browser.sent == [{"type": "websocket.close", "code": 1000}]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    yield
    assert current_request.get() is None


async def test_clients_that_ask_again_are_counted_by_tier() -> None:
    meter = RequestMeter()
    transport = httpx.ASGITransport(app=Edge(application(), meter=meter))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for count in ("0", "00", "", "-1", "1", "2", "x", "1 2"):
            headers = {"x-stainless-retry-count": count, "x-priority-tier": "batch"}
            await client.post(CHAT, json={}, headers=headers)
    counted = meter.tally.series_of(CLIENT_RETRIES)
    assert {labels: each.value for labels, each in counted.items()} == {("batch",): 2}


async def test_requests_that_get_a_lower_tier_than_they_asked_for_are_counted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.yaml"
    low = ApiKey(hash=hash_of("sk-low"), tenant="low", max_tier="standard")
    path.write_text("keys:\n" + dump_key(low))
    meter = RequestMeter()
    transport = httpx.ASGITransport(app=Edge(application(), KeyRing(str(path)), meter=meter))
    headers = {"authorization": "Bearer sk-low"}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for tier, service_tier in (
            *(("interactive", None), ("standard", None), ("batch", "priority")),
            *(("", "priority"), ("", "auto"), ("", None)),
        ):
            asked = {"x-priority-tier": tier} if tier else {}
            body = {"service_tier": service_tier}
            answer = await client.post(CHAT, json=body, headers=headers | asked)
            assert answer.status_code == 200
    counted = meter.tally.series_of(TIER_CLAMPED)
    assert {labels[0]: each.value for labels, each in counted.items()} == {
        "interactive": 0,
        "standard": 2,
        "batch": 0,
    }
