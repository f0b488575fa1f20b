"""The last rank dies: requests wait within their tier's bound, then 503; streams go on later."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.harness.cells.product import MODEL_NAME, Product, product

pytestmark = [pytest.mark.timeout(300), pytest.mark.ranks]

WAIT_S = 0.5
"""Longest wait of an interactive request; far less than a rank takes to start."""
TOKENS = 200
POLL_S = 0.02
BACK_LIMIT_S = 120.0
PROMPT = "Write a letter to a friend."


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Product]:
    interactive = {"queue_tasks_max": 8, "wait_ms": int(WAIT_S * 1e3)}
    settings = {"coordinator": {"tiers": {"interactive": interactive}}}
    with product(tmp_path, ranks=1, settings=settings) as up:
        yield up


def asked(**more: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": PROMPT, "temperature": 0, **more}


class Stream:
    """A greedy stream, read as it comes."""

    def __init__(self, url: str) -> None:
        self._url = url + "/v1"
        self.text = ""
        self.chunks = 0
        self.finish_reason: str | None = None

    async def read(self) -> None:
        extra = {"ignore_eos": True}
        request = asked(max_tokens=TOKENS, stream=True, extra_body=extra)
        async with openai.AsyncOpenAI(base_url=self._url, api_key="none", max_retries=0) as client:
            async for chunk in await client.completions.create(**request):
                for choice in chunk.choices:
                    self.text += choice.text
                    self.chunks += 1
                    self.finish_reason = choice.finish_reason or self.finish_reason


class Watch:
    """What the probes of the serving port say, and when."""

    def __init__(self, running: Product) -> None:
        self._running = running
        self.began_s = time.monotonic()
        self.ready: list[tuple[float, int]] = []
        self.health: set[int] = set()
        self.rank_back_s: float | None = None

    async def run(self) -> None:
        """Look until told to stop."""
        async with httpx.AsyncClient(base_url=self._running.url, timeout=5) as client:
            while True:
                status = (await client.get("/ready")).status_code
                self.ready.append((time.monotonic() - self.began_s, status))
                self.health.add((await client.get("/health")).status_code)
                ranks = await asyncio.to_thread(self._running.get, "/admin/ranks")
                is_here = not ranks["ranks"][0]["exited"]
                if self.unready_s is not None and is_here and self.rank_back_s is None:
                    self.rank_back_s = time.monotonic() - self.began_s
                await asyncio.sleep(POLL_S)

    @property
    def unready_s(self) -> float | None:
        """When the cell was first said to be not ready."""
        return next((at for at, status in self.ready if status != httpx.codes.OK), None)

    @property
    def ready_again_s(self) -> float | None:
        """When it was ready for the first time behind that."""
        unready_s = self.unready_s
        if unready_s is None:
            return None
        again = (at for at, code in self.ready if at > unready_s and code == httpx.codes.OK)
        return next(again, None)


async def until(holds: Any, limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(POLL_S)


async def test_requests_wait_are_refused_and_served_again(alone: Product) -> None:
    stream = Stream(alone.url)
    reading = asyncio.create_task(stream.read())
    await until(lambda: stream.chunks > 20, 60, "the stream does not begin")
    watch = Watch(alone)
    watching = asyncio.create_task(watch.run())
    os.kill(alone.get("/admin/ranks")["ranks"][0]["pid"], signal.SIGKILL)
    await until(lambda: watch.unready_s is not None, 10, "it is still called ready")
    async with httpx.AsyncClient(base_url=alone.url, timeout=60) as client:
        headers = {"X-Priority-Tier": "interactive"}
        sent = time.monotonic()
        refused = await client.post(
            "/v1/completions", json=asked(max_tokens=4), headers=headers, timeout=60
        )
        took_s = time.monotonic() - sent
        waiting = asyncio.create_task(client.post("/v1/completions", json=asked(max_tokens=4)))
        await until(lambda: watch.ready_again_s is not None, BACK_LIMIT_S, "the rank stays away")
        served = await waiting
    await asyncio.wait_for(reading, 60)
    watching.cancel()
    assert watch.unready_s is not None and watch.ready_again_s is not None
    assert watch.rank_back_s is not None
    late_s = watch.ready_again_s - watch.rank_back_s
    print(
        f"\nnot ready {watch.unready_s:.2f} s after the kill; refused after {took_s:.2f} s of"
        f" {WAIT_S} s; a rank again after {watch.rank_back_s:.1f} s, ready {late_s:.2f} s later"
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_healthy_workers")
    assert int(refused.headers["Retry-After"]) >= 1
    assert took_s > WAIT_S - 0.1
    assert sent + took_s < watch.began_s + watch.rank_back_s, "it has waited for the rank"
    assert served.status_code == httpx.codes.OK, "a tier with a longer wait has waited"
    assert watch.health == {httpx.codes.OK}
    assert late_s < watch.rank_back_s, "it serves at once, not when it has waited again"
    again = Stream(alone.url)
    await again.read()
    assert stream.finish_reason == again.finish_reason == "length"
    assert stream.text == again.text, "the stream that lost its rank is whole"
