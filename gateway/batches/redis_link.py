"""The batch store's access to Redis: keys, watching transactions, pages of records, errors.

The client is untyped, because redis-py's types cover the replies of every protocol version and
setting at once. Callers type the results.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import redis
from redis.exceptions import OutOfMemoryError, RedisError

from gateway.batches.store import Page, PageWanted, StorageError, StorageFullError
from gateway.batches.terms import BatchRecord, FileRecord

PREFIX = "{aileron}:batches:"
"""One slot of a cluster, so that a transaction may span all keys."""
WAIT_S = 5.0
"""Longest wait for an answer of Redis."""
PAGE_READ = 200
"""Records that are read at once for a page."""
TRIES_MAX = 50
"""Most tries of a transaction whose watched keys keep changing."""

Record = TypeVar("Record", FileRecord, BatchRecord)
Value = TypeVar("Value")
Pipeline = Any
Decide = Callable[[Pipeline], Value]


class RedisLink:
    """A connection; raises ValueError for an invalid Redis URL."""

    def __init__(self, url: str) -> None:
        self.redis: Any = redis.Redis.from_url(
            url, socket_timeout=WAIT_S, socket_connect_timeout=WAIT_S, decode_responses=False
        )

    def next_number(self) -> int:
        """Return a growing number; unused ones leave gaps, which are harmless."""
        return int(self.redis.incr(key("seq")))

    def change(self, decide: Decide[Value], *watched: str) -> Value:
        """Return the result of `decide` after the changes that it queued are made.

        `decide` reads before it calls `multi`. It is called again if a watched key changes
        meanwhile.
        """
        with translated(), self.redis.pipeline() as pipe:
            for _ in range(TRIES_MAX):
                try:
                    pipe.watch(*watched)
                    value = decide(pipe)
                    pipe.execute()
                except redis.WatchError:
                    continue
                return value
        raise StorageError("the batch store is too busy.")

    def page(
        self,
        ids_key: str,
        wanted: PageWanted,
        read: Callable[[list[bytes]], list[Record | None]],
        fits: Callable[[Record], bool],
    ) -> Page[Record]:
        """Return a page of the list whose ids are in the sorted set `ids_key`."""
        found: list[Record] = []
        with translated():
            place = 0
            if wanted.after is not None:
                rank = self.redis.zrank if wanted.oldest_first else self.redis.zrevrank
                before = rank(ids_key, wanted.after)
                if before is None:
                    return Page((), has_more=False)
                place = int(before) + 1
            while len(found) <= wanted.limit:
                ids = self.redis.zrange(
                    ids_key, place, place + PAGE_READ - 1, desc=not wanted.oldest_first
                )
                if not ids:
                    break
                place += len(ids)
                found += [each for each in read(ids) if each is not None and fits(each)]
        return Page(tuple(found[: wanted.limit]), len(found) > wanted.limit)


def key(kind: str, name: str = "") -> str:
    """Return the name of a key in Redis."""
    return f"{PREFIX}{kind}:{name}"


def read_record(text: Any, kind: type[Record]) -> Record | None:
    """Return the record encoded in `text`, or None for None."""
    return None if text is None else msgspec.json.decode(text, type=kind)


@contextmanager
def translated() -> Iterator[None]:
    """Turn errors of Redis into `StorageError`."""
    try:
        yield
    except OutOfMemoryError as error:
        raise StorageFullError("the Redis of the batch store is full.") from error
    except RedisError as error:
        raise StorageError(f"the Redis of the batch store does not work: {error}.") from error
