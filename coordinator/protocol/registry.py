"""The registry where cells announce themselves and gateways find them: leases in Redis.

A cell renews its lease in time, or gateways no longer find it. No clock is shared: Redis counts
each lease down itself. Coordinators and gateways call this module.
"""

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

ANNOUNCEMENTS_PER_LEASE = 3
"""How often a cell renews within the length of a lease."""

ANSWER_LIMIT_S = 2.0
"""Limit for Redis to connect and to answer; no request waits for it."""

CLIENT_OPTIONS: dict[str, Any] = {"socket_timeout": None}
"""For every asyncio client of Redis: the caller bounds the time with asyncio.timeout.

redis-py would use asyncio.wait_for, which in Python 3.11 swallows a cancellation that coincides
with the end of the awaited call: one in ten stopped tasks went on."""


class RegistryAwayError(Exception):
    """The registry did not answer in time, or answered with an error."""


class RedisRegistry:
    """The registry that all cells and gateways of a model share.

    Each cell has a key that expires, and a set names the keys: two commands find all cells, however
    much else that Redis holds. Each method but `close` may raise `RegistryAwayError`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        lease_ms: int,
        limit: Callable[[float], AbstractAsyncContextManager[Any]] = nullcontext,
    ) -> None:
        """`url` is a redis:// URL; `model` is the served model's name.

        `limit` bounds the time of each answer, in seconds, as asyncio.timeout does.
        """
        # Imported only where Redis is used: redis-py imports OpenTelemetry if that is installed.
        import redis.asyncio

        self._redis: Any = redis.asyncio.Redis.from_url(url, **CLIENT_OPTIONS)
        digest = hashlib.sha256(model.encode()).hexdigest()[:16]
        self._prefix = f"aileron:cells:{digest}"
        self._limit = limit
        self._lease_ms = lease_ms

    async def announce(self, name: str, address: str) -> None:
        """Announce a cell."""
        async with self._away(), self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._key(name), address, px=self._lease_ms)
            pipe.sadd(self._prefix, name)
            await pipe.execute()

    async def withdraw(self, name: str, address: str) -> None:
        """Withdraw a cell, unless another one has taken its name."""
        async with self._away():
            if await self._redis.get(self._key(name)) == address.encode():
                # A cell that takes the name in between is back with its next announcement.
                await self._redis.delete(self._key(name))

    async def cells(self) -> set[str]:
        """Return the addresses of all cells whose lease is running."""
        async with self._away():
            return await self._found()

    async def _found(self) -> set[str]:
        names = sorted(name.decode() for name in await self._redis.smembers(self._prefix))
        if not names:
            return set()
        addresses = await self._redis.mget([self._key(name) for name in names])
        lapsed = [name for name, address in zip(names, addresses, strict=True) if address is None]
        if lapsed:
            # A cell that comes back in between adds its name again.
            await self._redis.srem(self._prefix, *lapsed)
        return {address.decode() for address in addresses if address is not None}

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    @asynccontextmanager
    async def _away(self) -> AsyncIterator[None]:
        try:
            async with self._limit(ANSWER_LIMIT_S):
                yield
        except Exception as error:
            # Catch every driver error: no caller depends on an answer.
            raise RegistryAwayError(f"{type(error).__name__}: {error}") from error

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"
