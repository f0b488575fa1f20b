"""What the registry of cells promises, in a real Redis: leases that run out."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator

import pytest

from coordinator.protocol.registry import RedisRegistry, RegistryAwayError
from tests.harness.redis.redis_server import Redis

LEASE_MS = 300
SEEN_S = 30.0


@pytest.fixture
async def registry(request: pytest.FixtureRequest, redis: Redis) -> AsyncIterator[RedisRegistry]:
    made = RedisRegistry(redis.url, request.node.name, LEASE_MS)
    yield made
    await made.close()


async def until(registry: RedisRegistry, cells: set[str]) -> None:
    async with asyncio.timeout(SEEN_S):
        while await registry.cells() != cells:
            await asyncio.sleep(0.02)


async def test_cells_are_found_until_their_leases_run_out(registry: RedisRegistry) -> None:
    assert await registry.cells() == set()
    await registry.announce("cell-0", "host-0:8002")
    await registry.announce("cell-1", "host-1:8002")
    began_s = time.monotonic()
    await until(registry, set())
    assert time.monotonic() - began_s > 0.5 * LEASE_MS / 1_000
    await registry.announce("cell-1", "host-1:8002")
    await until(registry, {"host-1:8002"})


async def test_a_lease_lasts_as_long_as_it_is_repeated(registry: RedisRegistry) -> None:
    is_over = False

    async def repeat() -> None:
        while not is_over:
            await registry.announce("cell-0", "host-0:8002")
            await asyncio.sleep(LEASE_MS / 1_000 / 20)

    work = asyncio.create_task(repeat())
    try:
        await until(registry, {"host-0:8002"})
        deadline_s, seen = time.monotonic() + 3 * LEASE_MS / 1_000, 0
        while time.monotonic() < deadline_s:
            seen += bool(await registry.cells())
            await asyncio.sleep(0.02)
        assert seen
    finally:
        # Not cancelled: the driver may keep that to itself, and then nothing would ever end.
        is_over = True
        await asyncio.wait({work}, timeout=SEEN_S)


async def test_who_announces_can_be_stopped_at_any_moment(registry: RedisRegistry) -> None:
    async def repeat() -> None:
        while True:
            await registry.announce("cell-0", "host-0:8002")
            await asyncio.sleep(0)

    for number in range(200):
        work = asyncio.create_task(repeat())
        await asyncio.sleep(number % 20 / 4_000)
        work.cancel()
        done, _ = await asyncio.wait([work], timeout=SEEN_S)
        assert done, "the cancellation got lost"
        assert work.cancelled()


async def test_a_cell_takes_its_name_to_a_new_address_and_leaves(registry: RedisRegistry) -> None:
    registry._lease_ms = 60_000
    await registry.announce("cell-0", "old:8002")
    await registry.announce("cell-0", "new:8002")
    assert await registry.cells() == {"new:8002"}
    await registry.withdraw("cell-0", "old:8002")
    assert await registry.cells() == {"new:8002"}
    await registry.withdraw("cell-0", "new:8002")
    await registry.withdraw("cell-0", "new:8002")
    assert await registry.cells() == set()


async def test_models_do_not_see_each_others_cells(redis: Redis) -> None:
    one, other = (RedisRegistry(redis.url, model, 60_000) for model in ("one", "other"))
    await one.announce("cell-0", "host:1")
    assert await other.cells() == set()
    assert await one.cells() == {"host:1"}
    await one.close()
    await other.close()


async def test_a_redis_that_is_away_is_said_so() -> None:
    nobody = RedisRegistry("redis://127.0.0.1:1", "model", LEASE_MS)
    for ask in (nobody.cells(), nobody.announce("a", "b:1"), nobody.withdraw("a", "b:1")):
        with pytest.raises(RegistryAwayError):
            await ask
    await nobody.close()


async def test_a_full_redis_takes_no_announcement_but_tells_what_it_has() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("NOT TESTED: no redis-server on PATH (Debian: apt-get install redis-server).")
    full = Redis()
    try:
        registry = RedisRegistry(full.url, "model", 60_000)
        await registry.announce("cell-0", "host:1")
        await registry._redis.config_set("maxmemory", "1")
        await registry._redis.config_set("maxmemory-policy", "noeviction")
        with pytest.raises(RegistryAwayError):
            await registry.announce("cell-1", "host:2")
        assert await registry.cells() == {"host:1"}
        await registry.close()
    finally:
        full.stop()
