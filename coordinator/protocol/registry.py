"""Where cells say that they are there, and gateways find them: leases in Redis.

A cell repeats its announcement before its lease runs out; whoever does not is found no more. No
clock is shared: Redis counts each lease down itself. Called by coordinators and gateways.
"""

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol

ANNOUNCEMENTS_PER_LEASE = 3
"""How often a cell repeats that it is there in the time in which its lease runs out."""

ANSWER_LIMIT_S = 2.0
"""How long Redis may take to connect and to answer; nobody's request waits for it."""

CLIENT_OPTIONS: dict[str, Any] = {"socket_timeout": None}
"""Of every asyncio client of Redis: who calls it bounds the time, by asyncio.timeout.

redis-py would do it by asyncio.wait_for, which in Python 3.11 swallows a cancellation that comes
with the end of what it waits for: every tenth task that was stopped went on.
"""


class RegistryAwayError(Exception):
    """The registry did not answer in time, or not as it should."""


class CellRegistry(Protocol):
    """The cells that serve one model; each method may raise `RegistryAwayError`."""

    async def announce(self, name: str, address: str) -> None:
        """Say that a cell is there, from now on for the length of a lease."""

    async def withdraw(self, name: str, address: str) -> None:
        """Say that a cell is not there any more, unless another one took its name."""

    async def cells(self) -> set[str]:
        """Return the addresses of all cells whose leases last."""

    async def close(self) -> None:
        """Close what is open."""


class RedisRegistry:
    """The registry that all cells and gateways of a model share.

    Each cell has a key that runs out, and a set names the keys: finding them all is two commands,
    whatever else is in that Redis.
    """

    def __init__(
        self,
        url: str,
        model: str,
        lease_ms: int,
        limit: Callable[[float], AbstractAsyncContextManager[Any]] = nullcontext,
    ) -> None:
        """`url` is a redis:// URL; `model` the served model's name.

        `limit` bounds the time of each answer, in seconds: asyncio.timeout, say.
        """
        # Imported only where Redis is used: redis-py brings OpenTelemetry with it, if installed.
        import redis.asyncio

        self._redis: Any = redis.asyncio.Redis.from_url(url, **CLIENT_OPTIONS)
        digest = hashlib.sha256(model.encode()).hexdigest()[:16]
        self._prefix = f"aileron:cells:{digest}"
        self._limit = limit
        self._lease_ms = lease_ms

    async def announce(self, name: str, address: str) -> None:
        """Say that a cell is there."""
        async with self._away(), self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._key(name), address, px=self._lease_ms)
            pipe.sadd(self._prefix, name)
            await pipe.execute()

    async def withdraw(self, name: str, address: str) -> None:
        """Say that a cell is not there any more."""
        async with self._away():
            if await self._redis.get(self._key(name)) == address.encode():
                # A cell that takes the name in this moment is back with its next announcement.
                await self._redis.delete(self._key(name))

    async def cells(self) -> set[str]:
        """Return the addresses of all cells whose leases last."""
        async with self._away():
            return await self._found()

    async def _found(self) -> set[str]:
        names = sorted(name.decode() for name in await self._redis.smembers(self._prefix))
        if not names:
            return set()
        addresses = await self._redis.mget([self._key(name) for name in names])
        lapsed = [name for name, address in zip(names, addresses, strict=True) if address is None]
        if lapsed:
            # Whoever is back meanwhile puts itself in again.
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
            # Whatever the driver raises, nobody depends on an answer.
            raise RegistryAwayError(f"{type(error).__name__}: {error}") from error

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"
