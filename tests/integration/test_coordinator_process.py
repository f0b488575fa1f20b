"""`python -m coordinator` as a process: start, refusals, restart under ranks, orderly end."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli.ports import free_ports
from tests.harness.coordinator_process import START_LIMIT_S, TOKEN, Coordinator
from tests.harness.rank_sessions import RankSessions


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return Coordinator(tmp_path)


def refusal(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, said = process.communicate(timeout=START_LIMIT_S)
    return process.returncode, said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(coordinator: Coordinator, number: signal.Signals) -> None:
    with coordinator.running() as process:
        assert coordinator.get("/health") == {"status": "alive"}
        process.send_signal(number)
        status, said = refusal(process)
    assert status == 0
    assert "coordinator_stopped" in said
    assert "Traceback" not in said


async def test_ranks_go_on_through_a_restart(coordinator: Coordinator) -> None:
    async with RankSessions(f"127.0.0.1:{coordinator.grpc}", TOKEN, 2) as ranks:
        with coordinator.running():
            before = await coordinator.serving()
        bindings = [seat.binding for seat in ranks.seats.values()]
        with coordinator.running():
            after = await coordinator.serving()
        assert (after["layout"], after["epoch"]) == (before["layout"], before["epoch"])
        assert [seat.binding for seat in ranks.seats.values()] == bindings


def test_a_taken_port_is_named(coordinator: Coordinator) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", coordinator.admin))
        taken.listen(1)
        status, said = refusal(coordinator.start())
    assert (status, said.count("\n")) == (1, 1)
    assert f"cannot listen on 127.0.0.1:{coordinator.admin}" in said


def test_a_second_coordinator_does_not_share_the_port(coordinator: Coordinator) -> None:
    with coordinator.running():
        other = coordinator.file.with_name("other.yaml")
        (admin,) = free_ports(1)
        other.write_text(coordinator.file.read_text().replace(str(coordinator.admin), str(admin)))
        coordinator.file = other
        status, said = refusal(coordinator.start())
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{coordinator.grpc}" in said


def test_without_a_token_it_does_not_start(coordinator: Coordinator) -> None:
    status, said = refusal(coordinator.start(AILERON_TOKEN="short"))
    assert (status, said.count("\n")) == (2, 1)
    assert "AILERON_TOKEN" in said


def test_a_public_admin_port_needs_a_key(tmp_path: Path) -> None:
    public = Coordinator(tmp_path, admin={"host": "0.0.0.0", "port": 0})
    status, said = refusal(public.start(AILERON_ADMIN_KEY=""))
    assert (status, said.count("\n")) == (2, 1)
    assert "AILERON_ADMIN_KEY" in said


def test_it_imports_no_engine() -> None:
    code = (
        "import sys, coordinator.process\n"
        "print(sorted({'torch', 'vllm', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
