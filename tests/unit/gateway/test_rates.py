"""Requests and tokens per minute, whatever becomes of the shared counters."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.protocol.keys import ApiKey, hash_of
from coordinator.protocol.registry import RedisRegistry
from gateway.admission import shared_storage
from gateway.admission.rates import RateLimits, duration
from gateway.admission.shared_idempotency import SharedIdempotencyCache
from gateway.admission.shared_storage import SharedStorage, WaitBudget
from gateway.errors import ApiError
from tests.harness.redis.redis_server import IS_REAL, Redis

NOON_S = 20_000 * 86_400 + 43_200
"""A noon in UTC, in seconds since 1970."""


def key(name: str = "a", requests: int = 0, tokens: int = 0, day: int = 0) -> ApiKey:
    limits = {
        "requests_per_minute": requests,
        "tokens_per_minute": tokens,
        "tokens_per_day": day,
    }
    key = ApiKey(hash=hash_of(name), tenant="t")
    return key.model_copy(update=limits)


@pytest.fixture(params=["memory", "redis"])
async def limits(
    request: pytest.FixtureRequest, fresh_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RateLimits]:
    if request.param == "memory":
        yield RateLimits(SharedStorage("memory://"))
        return
    # A busy machine does not decide where these tests are run.
    monkeypatch.setattr(shared_storage, "STORAGE_WAIT_S", 60.0)
    storage = SharedStorage(fresh_redis.url)
    made = RateLimits(storage)
    yield made
    assert not storage._away_until_s, "all of it was counted in Redis"
    await close(made)


async def close(limits: Any) -> None:
    await limits._shared.storage.bridge.storage.aclose()


async def test_without_limits_there_are_no_headers(limits: RateLimits) -> None:
    assert await limits.admit(key(), 10**9, WaitBudget()) == []


async def test_requests_are_counted_per_key(limits: RateLimits) -> None:
    first = await limits.admit(key(requests=2), 5, WaitBudget())
    assert dict(first)[b"x-ratelimit-limit-requests"] == b"2"  # type: ignore[arg-type]
    assert dict(first)[b"x-ratelimit-remaining-requests"] == b"1"  # type: ignore[arg-type]
    await limits.admit(key(requests=2), 5, WaitBudget())
    refused = await limits.admit(key(requests=2), 5, WaitBudget())
    assert isinstance(refused, ApiError)
    assert refused.code == "rate_limit_exceeded"
    assert 1 <= refused.retry_after_s <= 60
    headers = dict(refused.headers())
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
    assert headers[b"retry-after"] == str(refused.retry_after_s).encode()
    assert isinstance(await limits.admit(key("b", requests=2), 5, WaitBudget()), list)


async def test_tokens_are_charged_before_and_after(limits: RateLimits) -> None:
    mine = key(tokens=100)
    headers = await limits.admit(mine, 30, WaitBudget())
    assert dict(headers)[b"x-ratelimit-remaining-tokens"] == b"70"  # type: ignore[arg-type]
    await limits.charge(mine, 50, WaitBudget())
    assert isinstance(await limits.admit(mine, 30, WaitBudget()), ApiError)
    assert isinstance(await limits.admit(mine, 10, WaitBudget()), list)
    await limits.charge(mine, 10**6, WaitBudget())
    assert isinstance(await limits.admit(mine, 1, WaitBudget()), ApiError)


async def test_a_request_that_never_fits_is_not_to_be_retried(limits: RateLimits) -> None:
    refused = await limits.admit(key(tokens=100), 101, WaitBudget())
    assert isinstance(refused, ApiError)
    assert (refused.status, refused.code) == (413, "request_too_large")
    assert "101 tokens" in refused.message
    assert "100 tokens per minute" in refused.message
    headers = dict(refused.headers())
    assert headers[b"x-should-retry"] == b"false"
    assert b"retry-after" not in headers
    assert isinstance(await limits.admit(key(tokens=100), 100, WaitBudget()), list)


async def test_a_day_has_a_budget_and_ends_at_midnight(limits: RateLimits) -> None:
    now_s = NOON_S
    limits._wall_clock = lambda: now_s
    mine = key(day=1_000)
    headers = dict(await limits.admit(mine, 100, WaitBudget()))  # type: ignore[arg-type]
    assert headers[b"x-ratelimit-limit-tokens-day"] == b"1000"
    assert headers[b"x-ratelimit-remaining-tokens-day"] == b"900"
    assert headers[b"x-ratelimit-reset-tokens-day"] == b"720m0s"
    await limits.charge(mine, 850, WaitBudget())
    refused = await limits.admit(mine, 51, WaitBudget())
    assert isinstance(refused, ApiError)
    assert (refused.status, refused.code) == (429, "token_budget_exceeded")
    assert "1000 tokens per day" in refused.message
    headers = dict(refused.headers())
    assert headers[b"x-ratelimit-remaining-tokens-day"] == b"50"
    assert headers[b"retry-after"] == b"60"
    assert headers[b"x-should-retry"] == b"false"
    assert isinstance(await limits.admit(mine, 50, WaitBudget()), list)
    await limits.charge(mine, 10**6, WaitBudget())
    assert isinstance(await limits.admit(mine, 1, WaitBudget()), ApiError)
    now_s += 43_199
    refused = await limits.admit(mine, 1, WaitBudget())
    assert isinstance(refused, ApiError)
    assert dict(refused.headers())[b"retry-after"] == b"2"
    now_s += 1
    assert isinstance(await limits.admit(mine, 900, WaitBudget()), list)


async def test_of_two_full_limits_the_day_s_is_named(limits: RateLimits) -> None:
    mine = key(requests=1, tokens=100, day=200)
    assert isinstance(await limits.admit(mine, 10, WaitBudget()), list)
    await limits.charge(mine, 500, WaitBudget())
    refused = await limits.admit(mine, 10, WaitBudget())
    assert isinstance(refused, ApiError)
    assert refused.code == "token_budget_exceeded"
    names = {name.decode() for name, _ in refused.extra_headers}
    assert {
        f"x-ratelimit-remaining-{each}" for each in ("requests", "tokens", "tokens-day")
    } < names
    never = await limits.admit(key("b", day=10), 11, WaitBudget())
    assert isinstance(never, ApiError)
    assert never.code == "request_too_large"
    assert "11 tokens, more than the 10 tokens per day" in never.message


async def test_a_request_that_one_limit_refuses_costs_nothing_of_the_other(
    limits: RateLimits,
) -> None:
    mine = key(requests=10, tokens=100)
    assert isinstance(await limits.admit(mine, 90, WaitBudget()), list)
    for _ in range(5):
        assert isinstance(await limits.admit(mine, 11, WaitBudget()), ApiError)
    headers = await limits.admit(mine, 1, WaitBudget())
    assert dict(headers)[b"x-ratelimit-remaining-requests"] == b"8"  # type: ignore[arg-type]


async def test_gateways_count_together(fresh_redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_storage, "STORAGE_WAIT_S", 60.0)
    one, two = (RateLimits(SharedStorage(fresh_redis.url)) for _ in range(2))
    mine = key(requests=2, tokens=100)
    daily = key("daily", day=100)
    assert isinstance(await one.admit(daily, 60, WaitBudget()), list)
    assert isinstance(await two.admit(daily, 60, WaitBudget()), ApiError)
    await two.charge(daily, 35, WaitBudget())
    assert isinstance(await one.admit(daily, 6, WaitBudget()), ApiError)
    for gateway in (one, two):
        assert isinstance(await gateway.admit(mine, 10, WaitBudget()), list)
    assert isinstance(await one.admit(mine, 10, WaitBudget()), ApiError)
    await one.charge(mine, 70, WaitBudget())
    other = key(tokens=100)
    refused = await two.admit(other, 11, WaitBudget())
    assert isinstance(refused, ApiError), "the same key's tokens"
    assert isinstance(await two.admit(other, 10, WaitBudget()), list)
    await close(one)
    await close(two)


HANG_S = 60.0
assert HANG_S > 20 * shared_storage.STORAGE_WAIT_S


class Broken:
    """Shared counters that fail or hang."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs
        self.asked = 0

    async def test(self, *args: Any, **kwargs: Any) -> bool:
        self.asked += 1
        if self.hangs:
            await asyncio.sleep(HANG_S)
        raise ConnectionError

    hit = test


@pytest.mark.parametrize("hangs", [True, False])
async def test_nobody_waits_for_shared_counters_that_are_away(hangs: bool) -> None:
    now, away = 100.0, []
    storage = SharedStorage("memory://", clock=lambda: now, away=lambda: away.append(now))
    limits = RateLimits(storage)
    broken: Any = Broken(hangs=hangs)
    limits._shared = broken
    began = time.perf_counter()
    assert isinstance(await limits.admit(key(requests=1), 1, WaitBudget()), list)
    assert time.perf_counter() - began < HANG_S / 2
    assert isinstance(await limits.admit(key(requests=1), 1, WaitBudget()), ApiError), (
        "each counts for itself"
    )
    assert broken.asked == 1, "it is left alone for a while"
    assert away == [100.0]
    now += shared_storage.STORAGE_RETRY_S + 1
    await limits.admit(key(requests=1), 1, WaitBudget())
    assert broken.asked == 2
    assert len(away) == 2


@pytest.mark.parametrize("url", ["redish://x", "http://x", ""])
def test_other_storages_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="rate_limit_storage"):
        SharedStorage(url)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.012, "12ms"), (1.5, "1.5s"), (59, "59s"), (360, "6m0s"), (-1, "0ms")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.skipif(not IS_REAL, reason="NOT TESTED: a Unix socket needs a real redis-server.")
async def test_a_redis_behind_a_unix_socket_serves_all_who_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_storage, "STORAGE_WAIT_S", 60.0)
    redis = Redis(tmp_path / "redis.sock")
    url = f"unix://{tmp_path / 'redis.sock'}"
    try:
        storage = SharedStorage(url)
        limits, replays = RateLimits(storage), SharedIdempotencyCache(storage)
        registry = RedisRegistry(url, "demo", 60_000)
        assert not isinstance(await limits.admit(key(requests=1), 0, WaitBudget()), ApiError)
        assert isinstance(await limits.admit(key(requests=1), 0, WaitBudget()), ApiError)
        assert await replays.begin("acme", "order-1", b"body", 0.0, WaitBudget()) is None
        await registry.announce("cell-0", "cell-0:8002")
        assert await registry.cells() == {"cell-0:8002"}
        assert not storage._away_until_s
        assert len(redis.keys()) >= 3, "all of it is there"
        for each in (replays, registry):
            await each.close()
        await close(limits)
    finally:
        redis.stop()


@pytest.mark.parametrize("url", ["redis+unix:///run/redis.sock", "http://here", "memory"])
def test_other_addresses_are_refused_with_a_sentence(url: str) -> None:
    with pytest.raises(ValueError, match="use memory:// or a redis:// URL"):
        SharedStorage(url)
