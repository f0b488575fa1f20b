"""No stream is cut short without saying so: processes of the product are killed in mid-stream.

Streams of all APIs are read at the same time: line by line, with OpenAI's Python client and with
its Node client. Whole is a stream with as many tokens as were asked for; see `read_streams`.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.harness.browser import node_client
from tests.harness.cells.product import MODEL_NAME, Product, product
from tests.harness.cells.read_streams import (
    CHOICES,
    PATHS,
    SILENT,
    TOLD,
    WHOLE,
    Reading,
    asked,
    read_raw,
    read_with_openai,
)

# One silent truncation is one too many.
pytestmark = [pytest.mark.timeout(400), pytest.mark.ranks]

STREAMS = 2
"""Of each API, by each of Python's readers."""
TOKENS = 400
"""Of each choice: enough for all streams to be in their middle at the same time."""
ENDS_WITHIN_S = 120.0
BEGINS_WITHIN_S = 60.0
WHOLE_AGAIN_WITHIN_S = 120.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with product(tmp_path_factory.mktemp("up"), ranks=2) as up:
        yield up


@pytest.fixture
def running(shared: Product) -> Product:
    """The product, whole again where another test has killed a part of it."""
    deadline = time.monotonic() + WHOLE_AGAIN_WITHIN_S
    while not is_whole(shared):
        assert time.monotonic() < deadline, shared.log()[-4000:]
        time.sleep(0.1)
    return shared


def is_whole(running: Product) -> bool:
    try:
        status, ready = running.get("/admin/status"), httpx.get(f"{running.url}/ready", timeout=5)
    except (OSError, httpx.TransportError):
        return False
    return bool(status["serving"] and status["gateways"] == 1 and ready.status_code == 200)


@pytest.fixture(scope="module")
def node_folder() -> Path:
    return node_client.install()


class NodeReader:
    """A process with OpenAI's Node client that reads one stream of each API."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.has_begun = False

    async def ends(self) -> Counter[str]:
        """Read what it says, and judge it."""
        assert self._process.stdout is not None
        ends: Counter[str] = Counter()
        async for line in self._process.stdout:
            said = json.loads(line)
            if said["name"] == "begun":
                self.has_begun = True
            else:
                ends[judge(said)] += 1
        assert await self._process.wait() == 0
        assert ends.total() == len(PATHS)
        return ends


def judge(said: dict[str, object]) -> str:
    """Say how a stream ended of which the Node client tells."""
    if not said["ended"]:
        return TOLD
    kind = str(said["name"])
    choices = range(CHOICES[kind])
    finish = {} if kind == "response" else {str(choice): "length" for choice in choices}
    is_whole = (said["finish"], said["tokens"]) == (finish, TOKENS * len(choices))
    return WHOLE if is_whole else SILENT


async def streams_while(running: Product, pid: int, node_folder: Path) -> Counter[str]:
    """Start streams, kill a process when all are in their middle, and see how they end."""
    node = NodeReader(
        await asyncio.create_subprocess_exec(
            *(node_client.NODE, "client.mjs", f"{running.url}/v1", "none"),
            *("killed", MODEL_NAME, str(TOKENS)),
            cwd=node_folder,
            stdout=asyncio.subprocess.PIPE,
        )
    )
    async with (
        httpx.AsyncClient(base_url=running.url, timeout=ENDS_WITHIN_S) as raw,
        openai.AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=ENDS_WITHIN_S
        ) as client,
    ):
        readers: list[Callable[..., Awaitable[str]]] = [
            lambda *what: read_raw(raw, *what),
            lambda *what: read_with_openai(client, *what),
        ]
        judging = asyncio.create_task(node.ends())
        async with asyncio.timeout(BEGINS_WITHIN_S):
            # A process takes its time to start; the other readers are there already.
            while not node.has_begun:
                await asyncio.sleep(0.01)
        readings: list[Reading] = []
        others = []
        for read in readers:
            for kind in list(PATHS) * STREAMS:
                readings.append(Reading(kind, TOKENS))
                body = asked(kind, MODEL_NAME, TOKENS, random.randrange(10**6))
                others.append(asyncio.ensure_future(read(body, readings[-1])))
        async with asyncio.timeout(BEGINS_WITHIN_S):
            while not all(reading.has_begun for reading in readings):
                await asyncio.sleep(0.01)
        assert not any(task.done() for task in (judging, *others)), "not all were in mid-stream"
        os.kill(pid, signal.SIGKILL)
        return Counter(await asyncio.gather(*others)) + await judging


@pytest.mark.parametrize("process", ["coordinator", "gateway", "rank"])
async def test_whatever_dies_no_stream_is_short_without_saying_so(
    running: Product, node_folder: Path, process: str
) -> None:
    """A dead coordinator is no reason to end a stream at all, nor is a rank's, even the last one.

    The rank leads the one group that there is, and the other one serves on alone.
    """
    if process == "rank":
        running.switch("tp2", "reshard")
        pid = int(running.get("/admin/ranks")["ranks"][0]["pid"])
    else:
        pid = running.child(process)
    ends = await streams_while(running, pid, node_folder)
    print(f"{process} killed under {ends.total()} streams: {dict(ends)}")
    assert ends[SILENT] == 0
    assert ends.total() == len(PATHS) * (2 * STREAMS + 1)
    if process != "gateway":
        assert ends[WHOLE] == ends.total()
    else:
        assert ends[TOLD] == ends.total()
