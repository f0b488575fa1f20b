"""The log of requests: which answers get a line, and what it holds."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.protocol.keys import ApiKey, dump_key, hash_of, new_secret
from coordinator.protocol.log_config import LogConfig
from coordinator.protocol.metrics_wire import TENANT_PROMPT_TOKENS, TENANT_REQUESTS
from coordinator.protocol.request_line import is_request_line
from coordinator.protocol.terms import Tier
from gateway.admission.keyring import KeyRing
from gateway.errors import RequestState
from gateway.http.edge import Edge, EdgeLimits
from gateway.http.line_call import LineCall
from gateway.telemetry.meter import RequestMeter
from gateway.telemetry.request_log import Asked, RequestLog
from tests.harness.gateway.edge_app import CHAT, Browser, application

SECRET_TEXT = "a secret prompt"
KEY, TIGHT_KEY = new_secret(), new_secret()


class Lines:
    """What a request log writes."""

    def __init__(self, config: LogConfig | None = None, **how: Any) -> None:
        self.texts: list[str] = []
        self.log = RequestLog(config or LogConfig(), ["demo", "alias"], self.texts.append, **how)

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.texts]


def noted(lines: Lines, request: RequestState | None = None, status: int = 200) -> None:
    asked = Asked("r1", "POST", CHAT, "acme", "0123456789abcdef", "demo")
    lines.log.note(
        asked, request or RequestState(), Tier.BATCH, status, "", began_s=10.0, took_s=2.0
    )


def a_course() -> RequestState:
    request = RequestState()
    request.prompt_tokens, request.cached_tokens, request.generated_tokens = 7, 4, 3
    request.first_token_at_s, request.queue_wait_ms = 10.5, 20
    request.finish_reasons = ("stop", "length", "stop")
    request.cell, request.layout, request.group, request.switches = "c:1", "tp2", "tp2", 2
    return request


def test_a_line_holds_the_course_of_a_request() -> None:
    lines = Lines()
    noted(lines, a_course())
    [line] = lines.all
    assert lines.texts[0].endswith("}\n")
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "request",
        "level": "info",
        "logger": "gateway.requests",
        "id": "r1",
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "tier": "batch",
        "duration_s": 2.0,
        "tenant": "acme",
        "key": "01234567",
        "model": "demo",
        "finish": "length,stop",
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "output_tokens": 3,
        "ttft_s": 0.5,
        "queue_s": 0.02,
        "cell": "c:1",
        "layout": "tp2",
        "group": "tp2",
        "switches": 2,
    }


def test_a_share_of_requests_is_logged() -> None:
    draws = iter([0.0, 0.24, 0.25, 0.99])
    lines = Lines(LogConfig(requests=0.25), chance=lambda: next(draws))
    for _ in range(4):
        noted(lines)
    assert len(lines.texts) == 2


@pytest.mark.parametrize("config", [LogConfig(requests=0), LogConfig(level="warning")])
def test_no_request_is_logged(config: LogConfig) -> None:
    lines = Lines(config)
    noted(lines)
    assert lines.texts == []
    lines.log.configure(LogConfig())
    noted(lines)
    assert len(lines.texts) == 1, "the configuration may change"


@pytest.mark.parametrize("form", ["json", "console"])
def test_lines_of_requests_are_recognised(form: Any) -> None:
    lines = Lines(LogConfig(format=form))
    noted(lines, a_course())
    assert is_request_line(lines.texts[0])
    assert "status=200" in lines.texts[0] or form == "json"
    assert not is_request_line('{"event": "request_failed", "level": "error"}')


def keys_file(folder: Path) -> Path:
    path = folder / "keys.yaml"
    path.write_text(
        "keys:\n"
        + dump_key(ApiKey(hash=hash_of(KEY), tenant="acme"))
        + dump_key(ApiKey(hash=hash_of(TIGHT_KEY), tenant="tight", requests_per_minute=1))
    )
    return path


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def meter() -> RequestMeter:
    return RequestMeter()


@pytest.fixture
def gate(lines: Lines, meter: RequestMeter, tmp_path: Path) -> Edge:
    return Edge(
        application(),
        KeyRing(str(keys_file(tmp_path))),
        limits=EdgeLimits(body_bytes_max=1_000),
        meter=meter,
        request_log=lines.log,
    )


@pytest.fixture
async def client(gate: Edge) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(gate)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers=headers
    ) as client:
        yield client


async def test_every_answer_has_one_line_without_text(
    client: httpx.AsyncClient, lines: Lines, meter: RequestMeter
) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": SECRET_TEXT}]}
    other_key = {"authorization": "Bearer sk-wrong"}
    tight = {"authorization": f"Bearer {TIGHT_KEY}"}
    await client.post(CHAT, json=body, headers={"x-request-id": "mine"})
    await client.post(CHAT, json={**body, "model": SECRET_TEXT})
    await client.post(CHAT, json=body, headers=other_key)
    await client.post(CHAT, json={**body, "user": "x" * 2_000})
    await client.post(CHAT, content=SECRET_TEXT, headers={"content-type": "application/json"})
    for _ in range(2):
        await client.post(CHAT, json=body, headers=tight)
    await client.get(f"/{SECRET_TEXT}")
    await client.post("/v1/completions", json={"events": ["{}", "[DONE]"]})
    await client.get("/version")
    await client.get("/health")
    about = [
        tuple(line.get(name) for name in ("route", "status", "tenant", "model", "error"))
        for line in lines.all
    ]
    assert about == [
        (CHAT, 200, "acme", "demo", None),
        (CHAT, 200, "acme", None, None),
        (CHAT, 401, None, None, "invalid_api_key"),
        (CHAT, 413, "acme", None, "request_too_large"),
        (CHAT, 400, "acme", None, "invalid_json"),
        (CHAT, 200, "tight", "demo", None),
        (CHAT, 429, "tight", "demo", "rate_limit_exceeded"),
        ("other", 404, None, None, "unknown_url"),
        ("/v1/completions", 200, "acme", None, None),
        ("/version", 200, "acme", None, None),
    ], "probes have none"
    assert lines.all[0]["id"] == "mine"
    assert lines.all[0]["key"] == hash_of(KEY).removeprefix("sha256:")[:8]
    written = "".join(lines.texts)
    assert SECRET_TEXT not in written
    assert KEY not in written
    counted = meter.tenants.tally.series_of(TENANT_REQUESTS)
    assert {labels: each.value for labels, each in counted.items()} == {
        ("acme", "standard"): 5,
        ("tight", "standard"): 2,
    }, "a client that is not identified is nobody's usage"


async def test_a_client_that_leaves_has_one_line(lines: Lines) -> None:
    gate = Edge(application(), request_log=lines.log)
    browser = Browser({"events": ["{}"] * 3}, reads=False)
    asked = asyncio.create_task(
        gate(browser.scope("/v1/completions"), browser.receive, browser.send)
    )
    while not browser.sent:
        await asyncio.sleep(0.01)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert len(lines.texts) == 1


async def test_a_line_of_a_batch_is_a_request(lines: Lines, gate: Edge) -> None:
    await gate.answer_line(LineCall(CHAT, b'{"model": "alias"}', "acme", 0))
    await gate.answer_line(LineCall(CHAT, b"x" * 2_000, "acme", 0))
    about = [(line["batch"], line["tier"], line["status"], line["tenant"]) for line in lines.all]
    assert about == [(True, "batch", 200, "acme"), (True, "batch", 413, "acme")]
    assert lines.all[0]["model"] == "alias"


def test_a_prompt_counts_once_it_is_computed() -> None:
    tenants = RequestMeter().tenants
    refused, computed = a_course(), a_course()
    refused.cell = computed.cell = ""
    refused.first_token_at_s = 0.0
    refused.generated_tokens = 0
    for request in (refused, computed):
        tenants.used("acme", Tier.BATCH, request)
    [(_, prompt)] = tenants.tally.series_of(TENANT_PROMPT_TOKENS).items()
    [(_, requests)] = tenants.tally.series_of(TENANT_REQUESTS).items()
    assert (prompt.value, requests.value) == (7, 2)


def test_a_log_that_cannot_be_written_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log = RequestLog(LogConfig(), ["demo"])
    monkeypatch.setattr("sys.stderr", Full())
    asked = Asked("r1", "POST", CHAT)
    log.note(asked, RequestState(), Tier.BATCH, 200, "", began_s=0.0, took_s=1.0)
