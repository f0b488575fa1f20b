"""`python -m coordinator` as a process: start, refusals, restart under ranks, orderly end."""

import asyncio
import http.client
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import grpc
import pytest

from coordinator.cli.ports import free_ports
from coordinator.protocol import wire
from coordinator.protocol.messages.gateway import GatewayHello, Submit, TaskFailed
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId, Tier
from coordinator.telemetry.metrics import CACHED_MS
from tests.harness.cells.coordinator_process import START_LIMIT_S, TOKEN, Coordinator
from tests.harness.cells.rank_sessions import RankSessions

AIO: Any = grpc.aio
SCRAPES_PER_S = 100
STORM_ROUNDS, STORM_TASKS = 3, 40


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return Coordinator(tmp_path)


def refusal(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, said = process.communicate(timeout=START_LIMIT_S)
    return process.returncode, said


def end(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """Send it a signal, and see that it ends in order."""
    process.send_signal(number)
    status, said = refusal(process)
    assert status == 0
    assert "coordinator_stopped" in said
    assert "Traceback" not in said


async def test_ranks_go_on_through_restarts(coordinator: Coordinator) -> None:
    async with RankSessions(f"127.0.0.1:{coordinator.grpc}", TOKEN, 2) as ranks:
        with coordinator.running() as process:
            before = await coordinator.serving()
            assert coordinator.get("/health") == {"status": "alive"}
            await asyncio.to_thread(end, process, signal.SIGTERM)
        bindings = [participant.binding for participant in ranks.participants.values()]
        with coordinator.running() as process:
            after = await coordinator.serving()
            await asyncio.to_thread(end, process, signal.SIGINT)
        assert (after["layout"], after["epoch"]) == (before["layout"], before["epoch"])
        assert [participant.binding for participant in ranks.participants.values()] == bindings


def test_a_port_that_is_taken_is_named(coordinator: Coordinator, tmp_path: Path) -> None:
    """That of the ranks too: a second coordinator does not share it."""
    text, (free,) = coordinator.file.read_text(), free_ports(1)
    with coordinator.running():
        for own, taken in (
            (coordinator.grpc, coordinator.admin),
            (coordinator.admin, coordinator.grpc),
        ):
            coordinator.file = tmp_path / "other.yaml"
            coordinator.file.write_text(text.replace(str(own), str(free)))
            status, said = refusal(coordinator.start())
            assert status == 1
            assert "Traceback" not in said
            # What gRPC says of its port comes before.
            assert f"cannot listen on 127.0.0.1:{taken}" in said.splitlines()[-1]


def test_without_a_token_it_does_not_start(coordinator: Coordinator) -> None:
    status, said = refusal(coordinator.start(AILERON_TOKEN="short"))
    assert (status, said.count("\n")) == (2, 1)
    assert "AILERON_TOKEN" in said


def test_a_public_admin_port_needs_a_key(tmp_path: Path) -> None:
    public = Coordinator(tmp_path, admin={"host": "0.0.0.0", "port": 0})
    status, said = refusal(public.start(AILERON_ADMIN_KEY=""))
    assert (status, said.count("\n")) == (2, 1)
    assert "AILERON_ADMIN_KEY" in said


def command(
    coordinator: Coordinator, *words: str, **env: str
) -> "subprocess.CompletedProcess[str]":
    url = f"http://127.0.0.1:{coordinator.admin}"
    return subprocess.run(
        [sys.executable, "-m", "coordinator.cli", *words, "--admin-url", url],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


def test_commands_work_with_the_key_of_their_role(coordinator: Coordinator) -> None:
    keys = {
        f"AILERON_{name}_KEY": f"a-{name.lower()}-key-for-tests"
        for name in ("ADMIN", "VIEWER", "METRICS")
    }
    viewer = {"AILERON_VIEWER_KEY": keys["AILERON_VIEWER_KEY"]}
    with coordinator.running(**keys):
        status = command(coordinator, "status", "--json", **viewer)
        assert status.returncode == 0, status.stderr
        assert json.loads(status.stdout)["layout"]
        refused = command(coordinator, "renew", **viewer)
        assert refused.returncode == 1
        assert "needs the role operator, and the key has the role viewer" in refused.stderr
        operator = command(coordinator, "renew", **keys)
        assert "No launcher of ranks is connected" in operator.stderr
        metrics = {"AILERON_VIEWER_KEY": keys["AILERON_METRICS_KEY"]}
        assert "needs the role viewer" in command(coordinator, "status", "--json", **metrics).stderr


def test_it_imports_no_engine() -> None:
    code = (
        "import sys, coordinator.process\n"
        "print(sorted({'torch', 'vllm', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


class Scrapes:
    """A hundred scrapes a second, from a thread, until they are stopped."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.texts: list[bytes] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        due_s = time.monotonic()
        while not self._stopping.wait(max(0.0, due_s - time.monotonic())):
            due_s += 1 / SCRAPES_PER_S
            link.request("GET", "/metrics")
            self.texts.append(link.getresponse().read())
        link.close()


async def turns_ms(call: Any, number: int) -> list[float]:
    """Times from a task's submission to the coordinator's word on it."""
    times = []
    for _ in range(number):
        name = TaskId(f"cmpl-{secrets.token_hex(8)}")
        header = TaskHeader(
            task=name,
            gateway="test",
            reply_to="tcp://127.0.0.1:1",
            prompt_tokens=10**6,
            max_tokens=1,
            tier=Tier.STANDARD,
        )
        began = time.perf_counter()
        await call.write(Submit(header, b""))
        while not isinstance(said := await call.read(), TaskFailed) or said.task != name:
            pass
        times.append((time.perf_counter() - began) * 1_000)
    return times


async def test_a_storm_of_scrapes_holds_up_no_task(coordinator: Coordinator) -> None:
    target = f"127.0.0.1:{coordinator.grpc}"
    calm: list[list[float]] = []
    stormy: list[list[float]] = []
    async with RankSessions(target, TOKEN, 2) as ranks:
        with coordinator.running():
            await coordinator.serving()
            async with AIO.insecure_channel(target, options=wire.CHANNEL_OPTIONS) as channel:
                call = channel.stream_stream(
                    wire.GATEWAY_PATH,
                    request_serializer=wire.encode,
                    response_deserializer=wire.decode_gateway_down,
                )(metadata=((wire.TOKEN_METADATA_KEY, TOKEN),))
                await call.write(GatewayHello(PROTOCOL_VERSION, "test"))
                scraped_s, texts = 0.0, []
                for _ in range(STORM_ROUNDS):
                    calm.append(await turns_ms(call, STORM_TASKS))
                    began = time.monotonic()
                    with Scrapes(coordinator.admin) as scrapes:
                        stormy.append(await turns_ms(call, STORM_TASKS))
                        while len(scrapes.texts) < SCRAPES_PER_S // 4:
                            await asyncio.sleep(0.01)
                    scraped_s += time.monotonic() - began
                    texts += scrapes.texts
                call.cancel()
        assert ranks.participants
    medians = [[statistics.median(times) for times in rounds] for rounds in (calm, stormy)]
    p99s = [
        statistics.quantiles([ms for times in rounds for ms in times], n=100)[98]
        for rounds in (calm, stormy)
    ]
    print(
        f"{len(texts)} scrapes in {scraped_s:.1f} s, {len(set(texts))} of them rendered; "
        f"a task's turn: median {medians[0]} -> {medians[1]} ms, p99 {p99s[0]:.1f} -> {p99s[1]:.1f}"
    )
    assert all(b"aileron_layout_info" in text for text in texts)
    rendered_max = scraped_s * 1_000 / CACHED_MS + STORM_ROUNDS
    assert len(set(texts)) <= rendered_max, "one text answers all scrapes within CACHED_MS"
    assert min(medians[1]) < 3 * max(medians[0])
