"""SIGKILL of the coordinator under load: streams go on, epochs go on, and switching works again."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import openai
import pytest

from tests.harness.cells.client_streams import Heard, all_streams, stream
from tests.harness.cells.product import Product, product

pytestmark = pytest.mark.ranks

CONTROL_BACK_S = 60.0
"""The target is 5 s; a machine that is busy with other things takes longer to start a process."""
RANKS = 2
STREAMS, TOKENS = 12, 240
"""Few enough to be served again and again meanwhile, whatever the machine."""
SESSION_OPENED = "rank_session_opened"


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Two ranks in fp32."""
    with product(
        tmp_path_factory.mktemp("restart"), ranks=RANKS, engine_args=["--dtype", "float32"]
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


async def ranks_are_back(cell: Product, sessions: int) -> float:
    """Wait until all ranks have sessions again, `sessions` with those before; returns when."""
    async with asyncio.timeout(CONTROL_BACK_S):
        while cell.log().count(SESSION_OPENED) < sessions:
            await asyncio.sleep(0.05)
    return time.monotonic()


class Load:
    """All streams, each begun again when it ends, so that how many there are tells no time."""

    def __init__(self, url: str) -> None:
        self._url = url + "/v1"
        self.enough = False
        self.heard: list[tuple[int, Heard]] = []
        """Every stream with its number, as far as it has come."""

    async def run(self) -> None:
        """Ask until there is enough, and wait for all."""
        async with openai.AsyncOpenAI(base_url=self._url, api_key="none", max_retries=0) as client:

            async def again_and_again(number: int) -> None:
                while not self.enough:
                    heard = Heard()
                    self.heard.append((number, heard))
                    await stream(client, number, heard, TOKENS)

            await asyncio.gather(*map(again_and_again, range(STREAMS)))

    async def all_begun(self) -> None:
        """Wait until all are in their middle."""
        async with asyncio.timeout(CONTROL_BACK_S):
            while {number for number, each in self.heard if each.text} != set(range(STREAMS)):
                await asyncio.sleep(0.01)


@pytest.mark.timeout(240)
async def test_streams_survive_the_coordinator(cell: Product) -> None:
    cell.switch("tp2", "recompute")
    cell.switch("dp2", "recompute")
    expected = await all_streams(cell.url, STREAMS, TOKENS)
    epoch = cell.get("/admin/layout")["epoch"]
    load = Load(cell.url)
    running = asyncio.create_task(load.run())
    await load.all_begun()
    pid = cell.child("coordinator")
    sessions = cell.log().count(SESSION_OPENED) + RANKS
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    led_s, answered = await asyncio.gather(
        ranks_are_back(cell, sessions), control_is_back(cell, pid)
    )
    assert answered >= epoch
    print(
        f"behind SIGKILL of the coordinator, ranks are led again after {led_s - killed_s:.2f} s, "
        f"the admin API answers after {time.monotonic() - killed_s:.2f} s"
    )
    await asyncio.to_thread(cell.switch, "tp2", "recompute")
    load.enough = True
    await running
    print(f"{len(load.heard)} streams, all of them whole")
    for number, each in load.heard:
        assert each.tokens == TOKENS, number
        assert "".join(each.text) == "".join(expected[number].text), number
    assert cell.get("/admin/layout")["epoch"] > epoch
