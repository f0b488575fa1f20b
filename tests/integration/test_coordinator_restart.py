"""SIGKILL of the coordinator under load: streams go on, epochs go on, and switching works again."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.harness.product import Product, product
from tests.integration.test_switch_under_load import STREAMS, TOKENS, all_streams

pytestmark = pytest.mark.slow

CONTROL_BACK_S = 10.0


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Two ranks in fp32."""
    with product(
        tmp_path_factory.mktemp("restart"), ranks=2, engine_args=["--dtype", "float32"]
    ) as running:
        yield running


async def control_is_back(cell: Product, pid: int) -> int:
    """Wait for another coordinator that serves; returns its epoch."""
    async with asyncio.timeout(CONTROL_BACK_S):
        while True:
            await asyncio.sleep(0.1)
            try:
                layout = await asyncio.to_thread(cell.get, "/admin/layout")
                if cell.child("coordinator") != pid and layout["serving"]:
                    return int(layout["epoch"])
            except (OSError, AssertionError):
                continue


@pytest.mark.timeout(240)
async def test_streams_survive_the_coordinator(cell: Product) -> None:
    cell.switch("tp2", "recompute")
    cell.switch("dp2", "recompute")
    expected = await all_streams(cell.url)
    epoch = cell.get("/admin/layout")["epoch"]
    running = asyncio.create_task(all_streams(cell.url))
    await asyncio.sleep(1.5)
    pid = cell.child("coordinator")
    os.kill(pid, signal.SIGKILL)
    assert await control_is_back(cell, pid) >= epoch
    assert not running.done(), "the restart must happen while streams run"
    await asyncio.to_thread(cell.switch, "tp2", "recompute")
    heard = await running
    assert len(heard) == STREAMS
    for number, (one, other) in enumerate(zip(expected, heard, strict=True)):
        assert other.tokens == TOKENS, number
        assert "".join(other.text) == "".join(one.text), number
    assert cell.get("/admin/layout")["epoch"] > epoch
