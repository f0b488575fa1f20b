"""Stored answers for `Idempotency-Key`, shared by all gateways through Redis if there is one.

A gateway that begins a request claims its key in Redis, and later replaces the claim by the answer.
A second request with the key gets the answer, or is refused while there is none. Each gateway also
keeps its own answers, for times without Redis or when it is slow or away: in an `IdempotencyCache`,
or with its siblings in `SiblingAnswers`. The claim of a dead gateway in Redis lasts as long as
OpenAI's clients wait for an answer. Called by the edge.
"""

import contextlib
import hashlib
import secrets
from typing import Any, Final

import msgspec

from coordinator.protocol.registry import CLIENT_OPTIONS
from gateway.admission.idempotency import (
    ANSWER_BYTES_MAX,
    RETENTION_S,
    IdempotencyCache,
    StoredAnswer,
    being_answered,
    check_key,
    used_for_another,
)
from gateway.admission.shared_storage import SharedStorage, StorageAwayError, WaitBudget
from gateway.admission.sibling_answers import SiblingAnswers
from gateway.errors import ApiError

CLAIM_S: Final = 600
"""Lifetime of a claim that is never completed: the OpenAI clients' own timeout."""
PREFIX: Final = "aileron:replays:"
Place = tuple[str, str]
"""Tenant and key."""


class _Stored(msgspec.Struct, array_like=True):
    """A value in Redis: a claim, or an answer."""

    request: bytes
    gateway: str
    answer: StoredAnswer | None = None


_decode = msgspec.msgpack.Decoder(_Stored).decode


class SharedIdempotencyCache:
    """One gateway's view of the shared answers."""

    def __init__(
        self, storage: SharedStorage, local: IdempotencyCache | SiblingAnswers | None = None
    ) -> None:
        """`local` is where answers are kept without Redis; by default in this process's memory."""
        self._storage = storage
        self._local = local or IdempotencyCache()
        self._gateway = secrets.token_hex(8)
        self._claims: dict[Place, bytes] = {}
        """Requests that this gateway has claimed in Redis and is answering."""
        self._redis: Any = _connect(storage.url) if storage.is_shared else None

    async def begin(
        self, tenant: str, key: str, request: bytes, now_s: float, budget: WaitBudget
    ) -> StoredAnswer | ApiError | None:
        """Return the stored answer or an error; after None, answer it and call `end`."""
        if (error := check_key(key)) is not None:
            return error
        place = (tenant, key)
        if self._redis is None or self._local.has(place, now_s):
            return self._local.begin(tenant, key, request, now_s)
        try:
            return await self._storage.ask(lambda: self._claim(place, request), budget)
        except StorageAwayError:
            if place in self._claims:
                return being_answered()
            return self._local.begin(tenant, key, request, now_s)

    async def end(
        self, tenant: str, key: str, answer: StoredAnswer | None, now_s: float, budget: WaitBudget
    ) -> None:
        """Store the answer; without a storable one, the next request with the key is a new one."""
        place = (tenant, key)
        if place not in self._claims:
            self._local.end(tenant, key, answer)
            return
        request = self._claims.pop(place)
        if answer is not None and len(answer.body) > ANSWER_BYTES_MAX:
            answer = None
        self._local.begin(tenant, key, request, now_s)
        self._local.end(tenant, key, answer)
        with contextlib.suppress(StorageAwayError):
            await self._storage.ask(lambda: self._settle(place, request, answer), budget)

    async def close(self) -> None:
        """Close the connection."""
        if isinstance(self._local, SiblingAnswers):
            self._local.close()
        if self._redis is not None:
            await self._redis.aclose()

    async def _claim(self, place: Place, request: bytes) -> StoredAnswer | ApiError | None:
        name = _name(place)
        claim = msgspec.msgpack.encode(_Stored(request, self._gateway))
        if not await self._redis.set(name, claim, nx=True, ex=CLAIM_S):
            found = await self._redis.get(name)
            stored = _decode(found) if found is not None else None
            if stored is not None and stored.request != request:
                return used_for_another()
            if stored is not None and stored.answer is not None:
                return stored.answer
            if stored is not None and (stored.gateway != self._gateway or place in self._claims):
                return being_answered()
            # The claim has just expired, or is ours and ended while Redis was away.
            await self._redis.set(name, claim, ex=CLAIM_S)
        self._claims[place] = request
        return None

    async def _settle(self, place: Place, request: bytes, answer: StoredAnswer | None) -> None:
        """Replace the claim by the answer, if the claim is still ours."""
        from redis.exceptions import WatchError

        name = _name(place)
        async with self._redis.pipeline() as pipe:
            await pipe.watch(name)
            found = await pipe.get(name)
            if (
                found is None
                or (stored := _decode(found)).gateway != self._gateway
                or stored.answer
            ):
                return
            pipe.multi()
            if answer is None:
                pipe.delete(name)
            else:
                text = msgspec.msgpack.encode(_Stored(request, self._gateway, answer))
                pipe.set(name, text, ex=RETENTION_S)
            try:
                await pipe.execute()
            except WatchError:
                return  # It expired just now, and another gateway has begun.


def _connect(url: str) -> Any:
    """Return an untyped client: redis-py's types cover all versions and settings at once.

    Imported only if Redis is used, because redis-py imports OpenTelemetry if that is installed.
    """
    import redis.asyncio

    return redis.asyncio.Redis.from_url(url, **CLIENT_OPTIONS)


def _name(place: Place) -> str:
    """Return the key's name in Redis: client text is hashed."""
    return PREFIX + hashlib.sha256("\0".join(place).encode()).hexdigest()
