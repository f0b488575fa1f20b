"""A gateway process that starts with mistakes, and how it ends."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.cli.ports import free_ports
from coordinator.protocol.messages.gateway import Submit
from tests.harness.cells import hasty_gateway
from tests.harness.cells.gateway_cell import TOKEN, FakeCell, GatewayProcess, Ran
from tests.harness.cells.warm import run_module
from worker.demo import MODEL_DIR

pytestmark = pytest.mark.timeout(240)

PATH = "/v1/chat/completions"
GRACE_S = 1.0
END_S = 5.0
"""How long behind its grace a gateway may take to end."""

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "say it"}],
    "stream": True,
}


def start(config: str, tmp_path: Path, token: str = TOKEN) -> tuple[int, str]:
    """Start a gateway that ends by itself: its exit code, and the last line that it said."""
    path = tmp_path / "gateway.yaml"
    path.write_text(config)
    code, said = run_module(
        "gateway",
        "gateway",
        ["--config", str(path)],
        env={**os.environ, "AILERON_TOKEN": token},
        limit_s=180,
    )
    return code, said.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("config", "token", "sentence"),
    [
        ("model: {path: x}", "short", "AILERON_TOKEN"),
        ("model: {path: x}\ngateway: {prot: 8000}", TOKEN, "gateway.prot"),
        ("{", TOKEN, "not valid YAML"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    tmp_path: Path, config: str, token: str, sentence: str
) -> None:
    code, said = start(config, tmp_path, token)
    assert code == 2
    assert said.startswith("gateway: ")
    assert sentence in said


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--no-such-option", "1"),
        ("--allowed-origins", '["*"]'),
    ],
)
def test_engine_option_that_is_none_or_not_offered_is_told_in_a_sentence(
    tmp_path: Path, option: str, value: str
) -> None:
    config = f"model: {{path: {MODEL_DIR}, engine_args: [{option}, '{value}']}}"
    code, said = start(config, tmp_path)
    assert code == 2
    assert said.startswith("gateway: model.engine_args: ")
    assert option in said


@pytest.mark.parametrize("parser", ["openai", "cohere_command4", "deepseek_v3", "no_such_parser"])
def test_a_tool_parser_that_cannot_read_the_model_is_refused(
    tmp_path: Path, cell: FakeCell, parser: str
) -> None:
    args = f"[--enable-auto-tool-choice, --tool-call-parser, {parser}]"
    config = (
        f"model: {{path: {MODEL_DIR}, engine_args: {args}}}\n"
        f"coordinator: {{listen: '127.0.0.1:{cell.port}'}}"
    )
    code, said = start(config, tmp_path)
    assert code == 2
    assert said.startswith("gateway: model.engine_args: ")
    assert {"openai": "hermes, which streams", "cohere_command4": "cohere_melody"}.get(
        parser, parser
    ) in said


@pytest.fixture
def cell() -> Iterator[FakeCell]:
    cell = FakeCell()
    yield cell
    cell.close()


@pytest.fixture(params=["uvloop", "asyncio"])
def gateway(
    request: pytest.FixtureRequest, cell: FakeCell, tmp_path: Path
) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path, MODEL_DIR, cell, loop=request.param)
    yield process
    process.close()


async def test_streams_finish_before_the_process_ends(
    gateway: GatewayProcess, cell: FakeCell
) -> None:
    running: list[Ran] = []

    async def begin(ran: Ran) -> None:
        ran.tokens(0, [600])
        running.append(ran)

    cell.behave = begin
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        stream = asyncio.create_task(client.post(PATH, json=CHAT))
        await cell.until(lambda: running)
        gateway.signal(signal.SIGTERM)

        async def unready() -> bool:
            return (await client.get("/ready")).status_code == 503

        while not await unready():
            await asyncio.sleep(0.01)
        for refused in (await client.post(PATH, json=CHAT), await client.get("/ready")):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert refused.headers["connection"] == "close"
            assert 1_000 <= int(refused.headers["retry-after-ms"]) <= 1_500
            assert refused.headers["retry-after"] in ("1", "2")
        assert (await client.get("/health")).status_code == 200
        assert gateway.process.poll() is None
        cell.on_leader(lambda: running[0].tokens(1, [601], "length"))
        assert "[DONE]" in (await stream).text
    assert gateway.wait(15) == 0
    assert len(cell.of(Submit)) == 1


@pytest.mark.parametrize("gateway", ["uvloop"], indirect=True)
async def test_second_signal_ends_it_at_once(gateway: GatewayProcess, cell: FakeCell) -> None:
    async def hang(ran: Ran) -> None:
        ran.tokens(0, [600])

    cell.behave = hang
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        stream = asyncio.create_task(client.post(PATH, json=CHAT))
        await cell.until(lambda: cell.of(Submit))
        gateway.signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert gateway.process.poll() is None
        gateway.signal(signal.SIGTERM)
        assert gateway.wait(2) == 128 + signal.SIGTERM
        await asyncio.gather(stream, return_exceptions=True)


async def test_a_stream_that_outlives_the_grace_is_told_and_the_process_ends(
    cell: FakeCell, tmp_path: Path
) -> None:
    env = hasty_gateway.patience({hasty_gateway.DRAIN_ENV: GRACE_S})
    gateway = GatewayProcess(tmp_path, MODEL_DIR, cell, module=hasty_gateway.__name__, env=env)

    async def hang(ran: Ran) -> None:
        ran.tokens(0, [600])

    cell.behave = hang
    try:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
            stream = asyncio.create_task(client.post(PATH, json=CHAT))
            whole = asyncio.create_task(client.post(PATH, json={**CHAT, "stream": False}))
            await cell.until(lambda: len(cell.of(Submit)) == 2)
            # The gateway must have the first token before it is told to end.
            await asyncio.sleep(0.5)
            gateway.signal(signal.SIGTERM)
            began = time.monotonic()
            answers = await asyncio.gather(stream, whole)
            told_s = time.monotonic() - began
        assert await asyncio.to_thread(gateway.wait, GRACE_S + END_S) == 0
        ended_s = time.monotonic() - began
    finally:
        gateway.close()
    print(f"grace of {GRACE_S} s: told after {told_s:.1f} s, ended after {ended_s:.1f} s")
    assert [answer.status_code for answer in answers] == [200, 503]
    events = [line for line in answers[0].text.split("\n\n") if line]
    assert json.loads(events[0].removeprefix("data: "))["choices"]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "draining"
    assert "[DONE]" not in answers[0].text
    assert answers[1].json()["error"]["code"] == "draining"
    assert answers[1].headers["connection"] == "close"
    assert told_s >= GRACE_S
    assert ended_s < GRACE_S + END_S


async def test_a_model_is_served_under_all_of_its_names(cell: FakeCell, tmp_path: Path) -> None:
    async def answer(ran: Ran) -> None:
        ran.tokens(0, [600], "length")

    cell.behave = answer
    process = GatewayProcess(tmp_path, MODEL_DIR, cell, other_names=["org/other"])
    try:
        async with httpx.AsyncClient(base_url=process.url, timeout=20) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed] == ["demo", "org/other"]
            chat = {**CHAT, "stream": False, "max_tokens": 1}
            for name, status in (("demo", 200), ("org/other", 200), ("other", 404)):
                answered = await client.post(PATH, json={**chat, "model": name})
                assert answered.status_code == status, answered.text
                if status == 200:
                    assert (await client.get(f"/v1/models/{name}")).json()["id"] == name
    finally:
        process.close()


async def test_its_own_metrics_show_while_its_cell_is_away(cell: FakeCell, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    process = GatewayProcess(tmp_path, MODEL_DIR, cell, metrics_listen=f"127.0.0.1:{port}")
    try:

        async def answer(ran: Ran) -> None:
            ran.tokens(0, [600], "length")

        cell.behave = answer
        async with httpx.AsyncClient(timeout=20) as client:

            async def samples() -> dict[str, float]:
                text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
                return {
                    each.name: each.value
                    for family in text_string_to_metric_families(text)
                    for each in family.samples
                    if each.labels.get("code", "200") == "200"
                    and each.labels.get("route", PATH) == PATH
                    and each.labels.get("tier", "standard") == "standard"
                }

            async def until(name: str, value: float) -> dict[str, float]:
                async with asyncio.timeout(20):
                    while (found := await samples()).get(name) != value:
                        await asyncio.sleep(0.05)
                return found

            assert (await client.post(process.url + PATH, json=CHAT)).status_code == 200
            found = await until("aileron_gateway_requests_total", 1)
            assert found["aileron_gateway_cells"] == found["aileron_gateway_ready"] == 1
            assert found["aileron_gateway_connections"] >= 1
            assert found["process_open_fds"] > 0
            assert found["aileron_gateway_loop_lag_seconds_count"] > 0
            cell.go_away()
            found = await until("aileron_gateway_ready", 0)
            assert found["aileron_gateway_requests_total"] == 1
            cell.come_back()
            await until("aileron_gateway_ready", 1)
    finally:
        process.close()
