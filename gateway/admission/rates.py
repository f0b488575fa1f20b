"""Requests and tokens per minute, and tokens per day, of each API key, counted by `limits`.

A request and its estimated prompt tokens are charged when it arrives, generated tokens when it
ends. Minutes slide; a day begins at 00:00 UTC. All gateways share Redis; while it is slow or away,
each counts for itself. Called by the edge.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from limits import RateLimitItem, RateLimitItemPerDay, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import FixedWindowRateLimiter, SlidingWindowCounterRateLimiter
from limits.storage import storage_from_string

from coordinator.protocol.keys import ApiKey
from coordinator.protocol.registry import CLIENT_OPTIONS
from gateway.admission.shared_storage import SharedStorage, StorageAwayError, WaitBudget
from gateway.errors import ApiError, api_error

RETRY_AFTER_MAX_S = 60
DAY_S = 86_400

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


@dataclass(frozen=True, slots=True)
class _Limit:
    """One limit of a key, and what a request costs of it."""

    what: str
    """Its name in headers."""
    words: str
    item: RateLimitItem
    cost: int
    names: tuple[str, ...]
    """What the storage counts under."""
    limiter: FixedWindowRateLimiter | SlidingWindowCounterRateLimiter
    reset_s: float | None
    """Until the window ends; None if the storage knows."""

    async def test(self) -> bool:
        return await self.limiter.test(self.item, *self.names, cost=self.cost)

    async def hit(self) -> bool:
        return await self.limiter.hit(self.item, *self.names, cost=self.cost)

    async def window(self) -> _Window:
        stats = await self.limiter.get_window_stats(self.item, *self.names)
        reset_s = max(stats.reset_time - time.time(), 0.0)
        reset_s = reset_s if self.reset_s is None else self.reset_s
        return _Window(self.what, self.item.amount, stats.remaining, reset_s)


class RateLimits:
    """The counters of a gateway."""

    def __init__(self, storage: SharedStorage, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock` says when a day ends: seconds since 1970."""
        self._local = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._storage = storage
        self._shared = _connect(storage.url) if storage.is_shared else None
        self._wall_clock = wall_clock

    async def admit(
        self, key: ApiKey, prompt_tokens: int, budget: WaitBudget
    ) -> Headers | ApiError:
        """Charge a request; return the headers of its answer, or why it must wait."""
        now_s = self._wall_clock()
        return await self._count(
            lambda limiter: _admit(_limits(limiter, key, prompt_tokens, now_s)), budget
        )

    async def charge(self, key: ApiKey, tokens: int, budget: WaitBudget) -> None:
        """Charge generated tokens: of the minute's limit at most the rest, of the day's all."""
        if tokens > 0 and (key.tokens_per_minute or key.tokens_per_day):
            now_s = self._wall_clock()
            await self._count(lambda limiter: _charge(limiter, key, tokens, now_s), budget)

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


def _limits(
    minutes: SlidingWindowCounterRateLimiter, key: ApiKey, tokens: int, now_s: float
) -> list[_Limit]:
    """Return the limits that a key has."""
    # The storage begins a window with its first count, so the day is a part of the name.
    day = ("tokens-day", str(int(now_s) // DAY_S))
    limits = (
        (key.requests_per_minute, "requests", "requests per minute", 1),
        (key.tokens_per_minute, "tokens", "tokens per minute", tokens),
    )
    found = [
        _Limit(what, words, RateLimitItemPerMinute(most), cost, (key.id, what), minutes, None)
        for most, what, words, cost in limits
        if most
    ]
    if key.tokens_per_day:
        item, names = RateLimitItemPerDay(key.tokens_per_day), (key.id, *day)
        reset_s = float(DAY_S - int(now_s) % DAY_S)
        days = FixedWindowRateLimiter(minutes.storage)
        found.append(_Limit(day[0], "tokens per day", item, tokens, names, days, reset_s))
    return found


async def _admit(limits: list[_Limit]) -> Headers | ApiError:
    for limit in limits:
        if limit.cost > limit.item.amount:
            return _never_fits(limit)
    # A request that one limit refuses is charged to none. Each step queries all limits at once,
    # because every round trip to Redis uses up the request's wait budget.
    full: list[_Limit] = []
    for step in (_Limit.test, _Limit.hit):
        if not full:
            fits = await asyncio.gather(*map(step, limits))
            full = [limit for limit, fit in zip(limits, fits, strict=True) if not fit]
    windows = await asyncio.gather(*map(_Limit.window, limits))
    headers = [header for window in windows for header in window.headers()]
    if not full:
        return headers
    # The day's limit comes last: it is the one that a client has to wait for.
    worst = full[-1] if full[-1].reset_s is not None else full[0]
    reset_s = next(window.reset_s for window in windows if window.what == worst.what)
    wait_s = min(max(round(reset_s + 0.5), 1), RETRY_AFTER_MAX_S)
    text = f"This API key has used its {worst.item.amount} {worst.words}: try again "
    if worst.reset_s is None:
        error = api_error("rate_limit_exceeded", f"{text}later.", retry_after_s=wait_s)
    else:
        text += "after 00:00 UTC, or ask for a larger budget."
        error = api_error("token_budget_exceeded", text, retry_after_s=wait_s)
    return error.with_headers(headers)


def _never_fits(limit: _Limit) -> ApiError:
    """Return the error of a request that is larger than a whole window's limit."""
    unit = limit.words.partition(" ")[0]
    text = (
        f"The request counts as {limit.cost} {unit}, more than the {limit.item.amount} "
        f"{limit.words} of this API key: send a shorter one, or ask for a higher limit."
    )
    return api_error("request_too_large", text)


async def _charge(
    limiter: SlidingWindowCounterRateLimiter, key: ApiKey, tokens: int, now_s: float
) -> None:
    for limit in _limits(limiter, key, tokens, now_s):
        if limit.what == "tokens":
            remaining = (await limit.window()).remaining
            if (cost := min(tokens, remaining)) > 0:
                await replace(limit, cost=cost).hit()
        elif limit.what != "requests":
            await limit.hit()
