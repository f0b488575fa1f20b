"""A real coordinator in a fleet: it announces itself, and leaves when it is told to end."""

import asyncio
import signal
from pathlib import Path

from coordinator.protocol.registry import RedisRegistry
from tests.harness.cells.coordinator_process import Coordinator
from tests.harness.redis.redis_server import Redis

SEEN_S = 60


async def test_a_coordinator_is_found_until_it_ends(tmp_path: Path) -> None:
    redis = Redis()
    registry = RedisRegistry(redis.url, "a/model", 60_000)
    fleet = {"redis": redis.url, "cell_name": "cell-0", "advertise": "{host}.cells:8002"}
    coordinator = Coordinator(tmp_path, fleet={**fleet, "lease_ms": 60_000})
    try:
        with coordinator.running() as process:
            async with asyncio.timeout(SEEN_S):
                while not (found := await registry.cells()):
                    await asyncio.sleep(0.02)
            (address,) = found
            assert address.endswith(".cells:8002")
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, SEEN_S) == 0
            # Long before its lease has run out.
            assert await registry.cells() == set()
    finally:
        await registry.close()
        redis.stop()


async def test_a_coordinator_works_without_its_redis(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, fleet={"redis": "redis://127.0.0.1:1"})
    with coordinator.running() as process:
        ranks = await asyncio.to_thread(coordinator.get, "/admin/ranks")
        assert len(ranks["ranks"]) == 2
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, SEEN_S) == 0
