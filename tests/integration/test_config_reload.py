"""Settings that change while real processes run: by file, by signal, by the admin port."""

import asyncio
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from coordinator.cli import main
from tests.harness.cells.coordinator_process import Coordinator
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240)]

APPLIED_S = 30.0
TEXT_BODY: dict[str, Any] = {"model": "demo", "prompt": "say it", "max_tokens": 4}


def change(path: Path, **sections: dict[str, Any]) -> None:
    """Change settings of a file, in one step."""
    config = yaml.safe_load(path.read_text())
    for name, fields in sections.items():
        config[name] = {**config.get(name, {}), **fields}
    fresh = path.with_suffix(".fresh")
    fresh.write_text(yaml.safe_dump(config))
    fresh.replace(path)


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + APPLIED_S
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


class Lines:
    """The log of a coordinator, read as it comes."""

    def __init__(self, stream: Any) -> None:
        self.all: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._reader.start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.all.append(json.loads(line))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.all if line["event"] == event]


def post_reload(coordinator: Coordinator) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{coordinator.admin}/admin/reload"
    request = urllib.request.Request(url, data=b"", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def goal_of(coordinator: Coordinator) -> str:
    url = f"http://127.0.0.1:{coordinator.admin}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    name = 'aileron_slo_target_seconds{measure="ttft",tier="standard"}'
    [line] = [line for line in text.splitlines() if line.startswith(name)]
    return line.split()[-1]


def test_commands_show_and_reload_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator = Coordinator(tmp_path)
    url = ("--admin-url", f"http://127.0.0.1:{coordinator.admin}")
    with coordinator.running() as process:
        Lines(process.stderr)
        config = coordinator.get("/admin/status")["config"]
        assert main(["reload", *url]) == 0
        assert f"configuration {config['hash']} applies" in capsys.readouterr().out
        change(coordinator.file, cell={"ranks": 4, "layout": "dp4"})
        assert main(["reload", *url]) != 0
        assert "cell.ranks, cell.layout: restart" in capsys.readouterr().err
        assert main(["status", "--once", *url]) == 0
        shown = capsys.readouterr().out
        assert f"config   {config['hash']}, read at 20" in shown
        assert "does not apply: the configuration changes cell.ranks" in shown
        assert main(["usage", "--by", "hour", "--last", "2", *url]) == 0
        assert "counted since 20" in capsys.readouterr().out
        assert main(["usage", "--last", "0", *url]) != 0
        assert "last" in capsys.readouterr().err


def test_a_coordinator_applies_its_file(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    with coordinator.running() as process:
        lines = Lines(process.stderr)
        first = coordinator.get("/admin/status")["config"]
        assert (goal_of(coordinator), first["refusal"]) == ("2.0", None)

        change(coordinator.file, slo={"standard": {"ttft_ms": 70.0}})
        until(lambda: goal_of(coordinator) == "0.07")
        second = coordinator.get("/admin/status")["config"]
        assert second["hash"] != first["hash"]
        assert lines.of("config_read")[0]["hash"] == second["hash"]

        change(coordinator.file, cell={"ranks": 4, "layout": "dp4"}, log={"level": "warning"})
        refused = until(lambda: coordinator.get("/admin/status")["config"]["refusal"])
        assert "cell.ranks" in refused
        assert coordinator.get("/admin/status")["config"]["hash"] == second["hash"]
        status, body = post_reload(coordinator)
        assert (status, body["error"]["code"]) == (409, "restart_needed")
        assert "cell.ranks, cell.layout" in body["error"]["message"]
        assert "log.level" not in body["error"]["message"]
        [action] = until(lambda: lines.of("admin_action"))
        assert (action["action"], action["status"]) == ("reload", 409)

        change(coordinator.file, cell={"ranks": 2, "layout": "dp2"})
        # A level of warning hides the line that says so.
        until(lambda: coordinator.get("/admin/status")["config"]["refusal"] is None)
        status, body = post_reload(coordinator)
        assert status == 200
        assert len(lines.of("admin_action")) == 1
        change(coordinator.file, log={"level": "info"})
        until(lambda: coordinator.get("/admin/status")["config"]["hash"] == second["hash"])

        before = len(lines.of("config_read"))
        process.send_signal(signal.SIGHUP)
        until(lambda: len(lines.of("config_read")) > before)
        assert lines.of("config_read")[-1]["changed"] == []
        assert process.poll() is None


@pytest.fixture
def own_gateway(own_cell: FakeCell, tmp_path: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path, MODEL_DIR, own_cell)
    yield process
    process.close()


async def test_a_gateway_applies_its_file(own_gateway: GatewayProcess, own_cell: FakeCell) -> None:
    own_cell.reset()

    async def answer(ran: Ran) -> None:
        ran.tokens(0, [300, 301], "length")

    own_cell.behave = answer
    file = own_gateway.log.with_name("gateway.yaml")

    def lines(event: str) -> list[dict[str, Any]]:
        texts = own_gateway.log.read_text().splitlines()
        parsed = [json.loads(text) for text in texts if text.startswith("{")]
        return [line for line in parsed if line["event"] == event]

    async def ask() -> int:
        """Send a request; return how many requests the log holds after it."""
        async with httpx.AsyncClient(base_url=own_gateway.url, timeout=20) as client:
            assert (await client.post("/v1/completions", json=TEXT_BODY)).status_code == 200
        await asyncio.sleep(0.2)
        return len(lines("request"))

    assert await ask() == 1
    change(file, log={"requests": 0})
    await asyncio.to_thread(until, lambda: lines("config_read"))
    assert await ask() == 1
    change(file, gateway={"requests_max": 7}, log={"requests": 1})
    [refused] = await asyncio.to_thread(until, lambda: lines("config_refused"))
    assert "gateway.requests_max" in refused["reason"]
    assert await ask() == 1
    change(file, gateway={"requests_max": 4_096})
    await asyncio.to_thread(until, lambda: len(lines("config_read")) == 2)
    assert await ask() == 2
    own_gateway.signal(signal.SIGHUP)
    await asyncio.to_thread(until, lambda: len(lines("config_read")) == 3)
    assert await ask() == 3
