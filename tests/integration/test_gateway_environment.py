"""A gateway among variables of vLLM's that would change its app, and in an image without a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.environment import PASSED
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR

pytestmark = pytest.mark.timeout(240)

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "say it"}],
    "max_tokens": 1,
}
SECRET = "sk-of-another-server"
WITHOUT_DEVICE = "tests.harness.cells.gateway_without_device"


@pytest.fixture
def cell() -> Iterator[FakeCell]:
    cell = FakeCell()

    async def answer(ran: Ran) -> None:
        ran.tokens(0, [600], "length")

    cell.behave = answer
    yield cell
    cell.close()


def assert_serves(gateway: GatewayProcess) -> None:
    with httpx.Client(base_url=gateway.url, timeout=30) as client:
        for headers in ({}, {"Authorization": "Bearer any"}):
            answer = client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == 200, answer.text
        assert client.post("/reset_prefix_cache").status_code == 404


def test_no_variable_of_vllm_changes_the_app(cell: FakeCell, tmp_path: Path) -> None:
    """All of them are set at once, to a value that most of them cannot even read."""
    from vllm.envs import environment_variables

    names = {name for name in environment_variables if name.startswith("VLLM_")} - PASSED
    env = dict.fromkeys(names, "1") | {"VLLM_API_KEY": SECRET, "VLLM_PORT": "tcp://10.0.0.1:80"}
    gateway = GatewayProcess(tmp_path, MODEL_DIR, cell, warm=False, env=env)
    try:
        assert_serves(gateway)
    finally:
        gateway.close()
    log = gateway.log.read_text()
    assert "VLLM_API_KEY does not protect this server" in log
    assert "VLLM_SERVER_DEV_MODE" in log
    assert SECRET not in log


def test_a_gateway_without_a_device_serves(cell: FakeCell, tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", WITHOUT_DEVICE, "platform"],
        env={name: value for name, value in os.environ.items() if name != "VLLM_TARGET_DEVICE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split()[-1] == "UnspecifiedPlatform"
    gateway = GatewayProcess(tmp_path, MODEL_DIR, cell, module=WITHOUT_DEVICE, warm=False)
    try:
        assert_serves(gateway)
    finally:
        gateway.close()
