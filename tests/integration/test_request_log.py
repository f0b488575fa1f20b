"""The lines that a real gateway process logs of requests, and the usage that it reports."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from coordinator.protocol.keys import ApiKey, dump_key, hash_of
from coordinator.protocol.messages.gateway import Submit
from coordinator.protocol.metrics_wire import USAGE, Measures
from tests.harness.cells.gateway_cell import SERVING, FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SECRET_TEXT = "the treasure lies below the old oak"
CHAT_BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": SECRET_TEXT}],
}
TEXT_BODY: dict[str, Any] = {"model": "demo", "prompt": SECRET_TEXT, "max_tokens": 16}
LINE_WAIT_S = 20.0


class Logging(GatewayProcess):
    """A gateway whose log is read."""

    def lines(self) -> list[dict[str, Any]]:
        texts = self.log.read_text().splitlines()
        parsed = [json.loads(text) for text in texts if text.startswith("{")]
        return [line for line in parsed if line["event"] == "request"]

    async def of(self, request_id: str) -> dict[str, Any]:
        """The one line of a request."""
        async with asyncio.timeout(LINE_WAIT_S):
            while not any(line["id"] == request_id for line in self.lines()):
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
        [line] = [line for line in self.lines() if line["id"] == request_id]
        return line


@pytest.fixture(scope="module")
def logging_gateway(
    own_cell: FakeCell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Logging]:
    folder = tmp_path_factory.mktemp("logging")
    keys = folder / "keys.yaml"
    entries = [
        ApiKey(hash=hash_of("sk-acme"), tenant="acme", max_tier="interactive"),
        ApiKey(hash=hash_of("sk-few"), tenant="few", requests_per_minute=1),
    ]
    keys.write_text("keys:\n" + "".join(map(dump_key, entries)))
    process = Logging(
        folder,
        MODEL_DIR,
        own_cell,
        keys_file=str(keys),
        other_names=("alias",),
        body_bytes_max=2_048,
        batches={"data_dir": str(folder / "batches")},
    )
    yield process
    process.close()


def client(gateway: Logging, key: str = "sk-acme") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20)


async def post(http: httpx.AsyncClient, request_id: str, path: str, body: Any) -> httpx.Response:
    return await http.post(path, json=body, headers={"x-request-id": request_id})


async def test_a_stream_through_a_switch_has_one_line(
    logging_gateway: Logging, own_cell: FakeCell
) -> None:
    own_cell.reset()

    async def through_a_switch(ran: Ran) -> None:
        ran.tokens(0, [300, 301], epoch=1)
        own_cell.set_state(SERVING.__class__("tp2", 2, True, 2, 2, 0, 2_048))
        await asyncio.sleep(0.2)
        ran.tokens(2, [302], "length", epoch=2)

    own_cell.behave = through_a_switch
    async with client(logging_gateway) as http:
        body = {**CHAT_BODY, "model": "alias", "stream": True, "service_tier": "priority"}
        answer = await post(http, "stream-1", CHAT, body)
        assert answer.status_code == 200
    line = await logging_gateway.of("stream-1")
    assert 0 < line.pop("ttft_s") < line.pop("duration_s") < LINE_WAIT_S
    assert line.pop("prompt_tokens") > 5
    assert line.pop("cell").endswith(str(own_cell.port))
    del line["timestamp"]
    assert line == {
        "event": "request",
        "level": "info",
        "logger": "gateway.requests",
        "id": "stream-1",
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "tier": "interactive",
        "tenant": "acme",
        "key": hash_of("sk-acme").removeprefix("sha256:")[:8],
        "model": "alias",
        "finish": "length",
        "cached_tokens": 0,
        "output_tokens": 3,
        "queue_s": 0.007,
        "layout": "tp2",
        "group": "tp2",
        "switches": 1,
    }


async def test_whole_answers_refusals_and_clients_that_leave(
    logging_gateway: Logging, own_cell: FakeCell
) -> None:
    own_cell.reset()

    async def answer(ran: Ran) -> None:
        ran.tokens(0, [300, 301], "length")

    own_cell.behave = answer
    async with client(logging_gateway) as http:
        await post(http, "whole", TEXT, {**TEXT_BODY, "n": 2})
        await post(http, "large", TEXT, {**TEXT_BODY, "user": "x" * 3_000})
        await post(http, "unknown-model", TEXT, {**TEXT_BODY, "model": "other"})
    async with client(logging_gateway, "sk-wrong") as http:
        await post(http, "wrong-key", TEXT, TEXT_BODY)
    async with client(logging_gateway, "sk-few") as http:
        await post(http, "first", TEXT, TEXT_BODY)
        await post(http, "second", TEXT, TEXT_BODY)

    async def begin(ran: Ran) -> None:
        ran.tokens(0, [300])

    own_cell.seen.clear()
    own_cell.behave = begin
    async with client(logging_gateway) as http:
        leaving = asyncio.create_task(post(http, "left", TEXT, TEXT_BODY))
        await own_cell.until(lambda: own_cell.of(Submit))
        await asyncio.sleep(0.3)
        leaving.cancel()
    lines = {
        name: await logging_gateway.of(name)
        for name in ("whole", "large", "unknown-model", "wrong-key", "first", "second", "left")
    }
    about = {
        name: tuple(line.get(field) for field in ("status", "tenant", "error", "output_tokens"))
        for name, line in lines.items()
    }
    assert about == {
        "whole": (200, "acme", None, 4),
        "large": (413, "acme", "request_too_large", None),
        "unknown-model": (404, "acme", "model_not_found", None),
        "wrong-key": (401, None, "invalid_api_key", None),
        "first": (200, "few", None, 2),
        "second": (429, "few", "rate_limit_exceeded", None),
        "left": (499, "acme", "client_gone", 1),
    }
    prompts = {lines[name]["prompt_tokens"] for name in ("whole", "first", "left")}
    assert len(prompts) == 1, "a prompt of two choices counts once, and so does an unread answer"
    assert "model" not in lines["unknown-model"]
    assert "switches" not in lines["large"]
    assert lines["left"]["switches"] == 0
    assert SECRET_TEXT not in logging_gateway.log.read_text()
    assert "sk-acme" not in logging_gateway.log.read_text()


async def test_lines_of_batches_are_requests_and_usage_reaches_the_cell(
    logging_gateway: Logging, own_cell: FakeCell
) -> None:
    own_cell.reset()

    async def answer(ran: Ran) -> None:
        ran.tokens(0, [300, 301, 302], "length")

    own_cell.behave = answer
    before = len(logging_gateway.lines())
    rows = [
        {"custom_id": f"line-{number}", "method": "POST", "url": TEXT, "body": TEXT_BODY}
        for number in range(3)
    ]
    text = "\n".join(map(json.dumps, rows))
    async with client(logging_gateway) as http:
        files = {"file": ("in.jsonl", text.encode())}
        made = await http.post("/v1/files", files=files, data={"purpose": "batch"})
        body = {
            "input_file_id": made.json()["id"],
            "endpoint": TEXT,
            "completion_window": "24h",
        }
        batch = (await http.post("/v1/batches", json=body)).json()
        async with asyncio.timeout(30):
            while batch["status"] != "completed":
                await asyncio.sleep(0.2)
                batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    lines = [line for line in logging_gateway.lines()[before:] if line.get("batch")]
    assert [(line["status"], line["tier"], line["tenant"]) for line in lines] == [
        (200, "batch", "acme")
    ] * 3
    assert sum(line["output_tokens"] for line in lines) == 9

    def usage() -> dict[str, float]:
        measures: list[Measures] = own_cell.of(Measures)  # type: ignore[type-var]
        newest: dict[str, float] = {}
        for message in measures:
            for family in message.families:
                if family.name in USAGE:
                    counts = {each.labels: each.value for each in family.series}
                    newest[family.name] = counts.get(("acme", "batch"), 0.0)
        return newest

    prompt_tokens = sum(line["prompt_tokens"] for line in lines)
    await own_cell.until(
        lambda: (
            usage()
            == {
                "aileron_tenant_requests": 3,
                "aileron_tenant_prompt_tokens": prompt_tokens,
                "aileron_tenant_cached_tokens": 0,
                "aileron_tenant_output_tokens": 9,
            }
        )
    )
