"""Ten times the load for a while, against the whole product: urgent requests hardly notice.

Two ranks with few places, a steady load with a goodput, then the same with ten times as many
standard and batch requests, whose clients try again as OpenAI's do. What is measured is printed.
"""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.harness.cells.product import MODEL_NAME, Product, product

pytestmark = [pytest.mark.timeout(300), pytest.mark.ranks]

INTERACTIVE_PER_S = 2.0
OTHERS_PER_S = 3.0
BURST = 10
CALM_S, BURST_S = 4.0, 7.0
CALM_LONG_S, BURST_LONG_S = 8.0, 15.0
GOOD_S = 8.0
"""An interactive answer that takes longer is of no use. Most take a second or two; a shared machine
may stand still for some seconds in between, whatever serves on it."""
BAD_MAX = 1
"""Interactive answers of the burst that may be of no use, beside the part that was before it."""
NORMAL_WITHIN_S = 30.0
TRIES = 3
TOKENS = 64
LIMITS = {
    "interactive": {"queue_tasks_max": 64, "wait_ms": 10_000},
    "standard": {"queue_tasks_max": 20, "wait_ms": 10_000},
    "batch": {"queue_tasks_max": 20, "wait_ms": 10_000},
}


@dataclass
class Seen:
    """What the clients of one phase saw."""

    sent: Counter[str] = field(default_factory=Counter)
    good: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    retry_after_s: list[int] = field(default_factory=list)
    retry_after_ms: list[int] = field(default_factory=list)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Product]:
    settings = {"coordinator": {"tiers": LIMITS}}
    with product(tmp_path, ranks=2, settings=settings, engine_args=["--max-num-seqs", "4"]) as up:
        yield up


async def ask(client: aiohttp.ClientSession, tier: str, seen: Seen) -> None:
    """One request with its retries, as OpenAI's clients make them."""
    body = {
        "model": MODEL_NAME,
        "prompt": f"def f{random.randrange(10**6)}(",
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }
    seen.sent[tier] += 1
    for _ in range(TRIES):
        began = time.perf_counter()
        headers = {"X-Priority-Tier": tier}
        async with client.post("/v1/completions", json=body, headers=headers) as response:
            answer = await response.json()
        took_s = time.perf_counter() - began
        seen.statuses[response.status] += 1
        if response.status == 200:
            seen.good[tier] += took_s < GOOD_S
            if tier == "interactive":
                seen.took_s.append(took_s)
            return
        assert response.status in (429, 503), answer
        seen.retry_after_s.append(int(response.headers["retry-after"]))
        seen.retry_after_ms.append(int(response.headers["retry-after-ms"]))
        if answer["error"]["code"] == "queue_full":
            seen.refused_ms.append(took_s * 1_000)
        # OpenAI's clients obey this header before the other, up to 60 s.
        await asyncio.sleep(seen.retry_after_ms[-1] / 1_000)


async def phase(client: aiohttp.ClientSession, seconds: float, factor: int) -> Seen:
    """Send at an open-loop rate for a while, then wait for the interactive answers."""
    seen = Seen()
    urgent: list[asyncio.Task[None]] = []
    others: list[asyncio.Task[None]] = []

    async def send(rate_per_s: float, tiers: list[str], into: list[asyncio.Task[None]]) -> None:
        began = time.monotonic()
        for number in range(int(seconds * rate_per_s)):
            # By the clock: who is late because the machine is busy sends no less for it.
            await asyncio.sleep(began + number / rate_per_s - time.monotonic())
            into.append(asyncio.create_task(ask(client, tiers[number % len(tiers)], seen)))

    await asyncio.gather(
        send(INTERACTIVE_PER_S, ["interactive"], urgent),
        send(OTHERS_PER_S * factor, ["standard", "batch"], others),
    )
    await asyncio.gather(*urgent)
    for task in others:
        # Their clients give up when the burst is over; a retry storm ends some time.
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return seen


def goodput(seen: Seen) -> float:
    return seen.good["interactive"] / seen.sent["interactive"]


@pytest.mark.parametrize(
    ("calm_s", "burst_s"),
    [(CALM_S, BURST_S), pytest.param(CALM_LONG_S, BURST_LONG_S, marks=pytest.mark.long)],
)
async def test_ten_times_the_load_leaves_urgent_requests_alone(
    running: Product, calm_s: float, burst_s: float
) -> None:
    # httpx takes long to find a connection among many: it would be the slowest part of this.
    async with aiohttp.ClientSession(
        running.url, connector=aiohttp.TCPConnector(limit=1_000)
    ) as client:
        await phase(client, 1.0, 1)
        calm = await phase(client, calm_s, 1)
        burst = await phase(client, burst_s, BURST)
        ended = time.monotonic()
        usual_s = statistics.median(calm.took_s)
        while True:
            after = Seen()
            await ask(client, "interactive", after)
            queued = running.get("/admin/status")["queue"]["tasks"]["queued"]
            if after.took_s and after.took_s[0] < 2 * usual_s + 0.1 and queued == 0:
                break
            assert time.monotonic() - ended < NORMAL_WITHIN_S
        normal_s = time.monotonic() - ended
    print(f"calm: goodput {goodput(calm):.3f}, median {usual_s:.2f} s, {dict(calm.statuses)}")
    print(
        f"{BURST}x: goodput {goodput(burst):.3f}, median {statistics.median(burst.took_s):.2f} s, "
        f"slowest {max(burst.took_s):.2f} s, {dict(burst.statuses)}, sent {dict(burst.sent)}"
    )
    assert burst.statuses[429] > 0, "the burst was no burst"
    print(
        f"refusals of a full queue: median {statistics.median(burst.refused_ms):.0f} ms, "
        f"slowest {max(burst.refused_ms):.0f} ms; Retry-After {min(burst.retry_after_s)} to "
        f"{max(burst.retry_after_s)} s; normal after {normal_s:.1f} s"
    )
    asked = burst.sent["interactive"]
    assert burst.good["interactive"] >= goodput(calm) * asked - BAD_MAX
    assert all(1 <= seconds <= 60 for seconds in burst.retry_after_s)
    assert len(set(burst.retry_after_ms)) > 1, "clients must not come back together"
