"""No stream is cut short without saying so: processes of the product are killed in mid-stream.

A stream is whole if it ends with a finish reason and `[DONE]`, and told if it ends with an in-band
error or a broken connection. Anything else is a silent truncation, of which there must be none.
"""

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.harness.product import MODEL_NAME, Product, product

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

STREAMS = 12
TOKENS = 300
WHOLE, TOLD, SILENT = "whole", "told", "SILENT TRUNCATION"
ENDS_WITHIN_S = 90.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Product]:
    with product(tmp_path, ranks=2) as up:
        yield up


async def stream(client: httpx.AsyncClient, tokens: list[int], seed: int) -> str:
    """Read one stream as a client would, and say how it ended."""
    body = {
        "model": MODEL_NAME,
        "prompt": f"def number_{seed}(",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
    }
    finish, events = None, [""]
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return TOLD
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                events.append(line[6:])
                if events[-1] == "[DONE]":
                    continue
                event = json.loads(events[-1])
                if "error" in event:
                    assert isinstance(event["error"]["code"], str)
                    return TOLD
                tokens[0] += 1
                finish = event["choices"][0]["finish_reason"] or finish
    except httpx.TransportError:
        return TOLD
    return WHOLE if finish == "length" and events[-1] == "[DONE]" else SILENT


async def run_streams(url: str, kill: "asyncio.Future[None] | None", seeds: range) -> Counter[str]:
    tokens = [0]
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=ENDS_WITHIN_S, limits=limits) as client:
        work = [asyncio.create_task(stream(client, tokens, seed)) for seed in seeds]
        while tokens[0] < 5 * STREAMS and not all(task.done() for task in work):
            await asyncio.sleep(0.01)
        assert not all(task.done() for task in work), "nothing was in mid-stream"
        if kill is not None:
            kill.set_result(None)
        return Counter(await asyncio.gather(*work))


async def streams_while(running: Product, pid: int) -> Counter[str]:
    """Start streams, kill a process in the middle of them, and see how they end."""
    kill = asyncio.get_running_loop().create_future()
    seeds = range(random.randrange(10**6), 10**9)[:STREAMS]
    work = asyncio.create_task(run_streams(running.url, kill, seeds))
    await asyncio.wait({kill, work}, return_when=asyncio.FIRST_COMPLETED)
    os.kill(pid, signal.SIGKILL)
    return await work


@pytest.mark.parametrize("process", ["coordinator", "gateway", "rank"])
async def test_whatever_dies_no_stream_is_short_without_saying_so(
    running: Product, process: str
) -> None:
    """A dead coordinator is no reason to end a stream at all, nor is a rank's, even the last one.

    The rank leads the one group that there is, so the other is stuck with it, and ends too.
    """
    if process == "rank":
        running.switch("tp2", "reshard")
        pid = int(running.get("/admin/ranks")["ranks"][0]["pid"])
    else:
        pid = running.child(process)
    ends = await streams_while(running, pid)
    print(f"{process} killed under {STREAMS} streams: {dict(ends)}")
    assert ends[SILENT] == 0
    assert ends.total() == STREAMS
    if process != "gateway":
        assert ends[WHOLE] == STREAMS
