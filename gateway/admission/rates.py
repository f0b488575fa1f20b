"""Requests and tokens per minute of each API key, counted in memory or in Redis by `limits`.

A request and its estimated prompt tokens are charged when it arrives, generated tokens when it
ends. All gateways share Redis; while it is slow or away, each counts for itself. Called by the
edge.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.storage import storage_from_string

from coordinator.protocol.keys import ApiKey
from coordinator.protocol.registry import CLIENT_OPTIONS
from gateway.admission.shared_storage import SharedStorage, StorageAwayError, WaitBudget
from gateway.errors import ApiError, api_error

RETRY_AFTER_MAX_S = 60

Headers = list[tuple[bytes, bytes]]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Window:
    """The remainder of one limit."""

    what: str
    limit: int
    remaining: int
    reset_s: float

    def headers(self) -> Headers:
        """Return OpenAI's three headers."""
        values = {
            "limit": str(self.limit),
            "remaining": str(max(self.remaining, 0)),
            "reset": duration(self.reset_s),
        }
        return [
            (f"x-ratelimit-{name}-{self.what}".encode(), value.encode())
            for name, value in values.items()
        ]


class RateLimits:
    """The counters of a gateway."""

    def __init__(self, storage: SharedStorage) -> None:
        self._local = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._storage = storage
        self._shared = _connect(storage.url) if storage.is_shared else None

    async def admit(
        self, key: ApiKey, prompt_tokens: int, budget: WaitBudget
    ) -> Headers | ApiError:
        """Charge a request; return the headers of its answer, or why it must wait."""
        return await self._count(lambda limiter: _admit(limiter, key, prompt_tokens), budget)

    async def charge(self, key: ApiKey, tokens: int, budget: WaitBudget) -> None:
        """Charge generated tokens, at most the rest of the limit."""
        if key.tokens_per_minute and tokens > 0:
            await self._count(lambda limiter: _charge(limiter, key, tokens), budget)

    async def _count(
        self,
        work: Callable[[SlidingWindowCounterRateLimiter], Awaitable[Result]],
        budget: WaitBudget,
    ) -> Result:
        shared = self._shared
        if shared is None:
            return await work(self._local)
        try:
            return await self._storage.ask(lambda: work(shared), budget)
        except StorageAwayError:
            return await work(self._local)


def duration(seconds: float) -> str:
    """Format a time as OpenAI does: 12ms, 7.5s, 6m0s."""
    if seconds < 1:
        return f"{max(round(seconds * 1_000), 0)}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{int(seconds // 60)}m{int(seconds % 60)}s"


def _connect(url: str) -> SlidingWindowCounterRateLimiter:
    options: dict[str, Any] = {} if url.startswith("memory:") else dict(CLIENT_OPTIONS)
    # redis-py's unix:// is redis+unix:// in this library.
    named = f"redis+{url}" if url.startswith("unix://") else url
    storage = storage_from_string(f"async+{named}", implementation="redispy", **options)
    return SlidingWindowCounterRateLimiter(storage)


async def _admit(
    limiter: SlidingWindowCounterRateLimiter, key: ApiKey, prompt_tokens: int
) -> Headers | ApiError:
    limits = [
        (what, RateLimitItemPerMinute(limit), cost)
        for what, limit, cost in (
            ("requests", key.requests_per_minute, 1),
            ("tokens", key.tokens_per_minute, prompt_tokens),
        )
        if limit
    ]
    for what, limit, cost in limits:
        if cost > limit.amount:
            return _never_fits(what, limit.amount, cost)
    # A request that one limit refuses is charged to none. Each step queries both limits at once,
    # because every round trip to Redis uses up the request's wait budget.
    full: list[tuple[str, RateLimitItem]] = []
    for step in (limiter.test, limiter.hit):
        if not full:
            calls = [step(item, key.id, what, cost=cost) for what, item, cost in limits]
            fits = await asyncio.gather(*calls)
            full = [limits[number][:2] for number, fit in enumerate(fits) if not fit]
    windows = await asyncio.gather(*(_window(limiter, item, key, what) for what, item, _ in limits))
    headers = [header for window in windows for header in window.headers()]
    if not full:
        return headers
    what, item = full[0]
    reset_s = next(window.reset_s for window in windows if window.what == what)
    wait_s = min(max(round(reset_s + 0.5), 1), RETRY_AFTER_MAX_S)
    text = f"This API key has used its {item.amount} {what} per minute: try again later."
    error = api_error("rate_limit_exceeded", text, retry_after_s=wait_s)
    return error.with_headers(headers)


def _never_fits(what: str, amount: int, cost: int) -> ApiError:
    """Return the error of a request that is larger than a whole minute's limit."""
    text = (
        f"The request counts as {cost} {what}, more than the {amount} {what} per minute of this "
        "API key: send a shorter one, or ask for a higher limit."
    )
    return api_error("request_too_large", text)


async def _charge(limiter: SlidingWindowCounterRateLimiter, key: ApiKey, tokens: int) -> None:
    item = RateLimitItemPerMinute(key.tokens_per_minute)
    remaining = (await limiter.get_window_stats(item, key.id, "tokens")).remaining
    if (cost := min(tokens, remaining)) > 0:
        await limiter.hit(item, key.id, "tokens", cost=cost)


async def _window(
    limiter: SlidingWindowCounterRateLimiter, item: RateLimitItem, key: ApiKey, what: str
) -> _Window:
    stats = await limiter.get_window_stats(item, key.id, what)
    return _Window(what, item.amount, stats.remaining, max(stats.reset_time - time.time(), 0.0))
