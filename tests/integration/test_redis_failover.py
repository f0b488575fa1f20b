"""Rates and kept answers while their Redis fails over to its replica behind one address."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.protocol.keys import ApiKey, dump_key, hash_of
from gateway.edge import Edge
from gateway.keyring import KeyRing
from gateway.rates import RateLimits
from gateway.shared_replays import SharedReplays
from gateway.shared_storage import STORAGE_RETRY_S, STORAGE_WAIT_S, SharedStorage
from tests.harness.redis_pair import RedisPair
from tests.harness.tcp_proxy import TcpProxy
from tests.unit.gateway.edge_app import CHAT, application

pytestmark = [pytest.mark.timeout(300), pytest.mark.timing]

LIMIT_S = 120
PER_MINUTE = 100_000
BEFORE = 20
KEY = ApiKey(
    hash=hash_of("sk-acme"),
    tenant="acme",
    max_tier="interactive",
    default_tier="standard",
    requests_per_minute=PER_MINUTE,
    tokens_per_minute=0,
)


class Timed(SharedStorage):
    """Notes how long requests waited for Redis, and when it answered."""

    waits_s: list[float]
    answered_at_s: float = 0.0

    async def ask(self, work: Callable[[], Awaitable[Any]]) -> Any:
        began = time.monotonic()
        try:
            answer = await super().ask(work)
            self.answered_at_s = time.monotonic()
            return answer
        finally:
            self.waits_s.append(time.monotonic() - began)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RedisPair]:
    with RedisPair(tmp_path) as made:
        yield made


@pytest.fixture
def address(pair: RedisPair) -> Iterator[TcpProxy]:
    with TcpProxy(pair.ports[0]) as made:
        yield made


async def one(client: httpx.AsyncClient, number: int) -> httpx.Response:
    """A chat that counts against a limit and is kept for its key."""
    headers = {"authorization": "Bearer sk-acme", "idempotency-key": f"n{number}"}
    response = await client.post(CHAT, json={}, headers=headers)
    assert response.status_code == 200, response.text
    return response


async def test_a_failover_costs_no_request_anything(
    pair: RedisPair, address: TcpProxy, tmp_path: Path
) -> None:
    """The primary is silent first, then killed, and its replica takes its address."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n" + dump_key(KEY))
    storage = Timed(f"redis://127.0.0.1:{address.port}")
    storage.waits_s = []
    replays = SharedReplays(storage)
    gate = Edge(application(), KeyRing(str(keys)), RateLimits(storage), replays=replays)
    transport = httpx.ASGITransport(app=gate)
    deadline = time.monotonic() + LIMIT_S
    number = 0
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

        async def ask_until(condition: Callable[[], bool]) -> httpx.Response:
            nonlocal number
            while True:
                number += 1
                response = await one(client, number)
                if condition():
                    return response
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)

        counted = 0

        def is_shared() -> bool:
            nonlocal counted
            counted += storage.answered_at_s > time.monotonic() - 1
            return counted >= BEFORE

        await ask_until(is_shared)
        storage.waits_s.clear()
        failed = time.monotonic()
        address.is_silent = True
        await ask_until(lambda: time.monotonic() > failed + 0.5)
        pair.kill_primary()
        address.cut()
        await ask_until(lambda: time.monotonic() > failed + 1)
        pair.promote()
        address.target, address.is_silent = pair.ports[1], False
        address.cut()
        promoted = time.monotonic()
        last = await ask_until(lambda: storage.answered_at_s > promoted)
    await replays.close()
    took_s = storage.answered_at_s - promoted
    waited = [wait for wait in storage.waits_s if wait >= STORAGE_WAIT_S]
    kind = "real Redis" if pair.is_real else "Redis' protocol alone"
    print(f"{kind}: {number} requests, no error; counted together {took_s:.1f} s after promotion;")
    least_ms, longest_ms = STORAGE_WAIT_S * 1e3, max(storage.waits_s) * 1e3
    print(f"{len(waited)} waits of {least_ms:.0f} ms or more, longest {longest_ms:.0f} ms")
    # One request finds out, and then none asks for two seconds.
    assert len(waited) <= 2 + (storage.answered_at_s - failed) / STORAGE_RETRY_S
    left = int(last.headers["x-ratelimit-remaining-requests"])
    assert left < PER_MINUTE
    if pair.is_real:
        assert left <= PER_MINUTE - BEFORE, "the replica knew what was counted before"
