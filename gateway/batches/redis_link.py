"""A Redis as the batch store uses it: keys, transactions that watch, pages of records, errors.

redis-py's types describe the replies of every protocol version and setting at once, so the client
is untyped here, and what it returns is typed by whoever asks.
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
"""How long Redis may take to answer."""
PAGE_READ = 200
"""Records that are read at once for a page."""
TRIES_MAX = 50
"""How often a transaction begins anew because others changed what it watches."""

Record = TypeVar("Record", FileRecord, BatchRecord)
Value = TypeVar("Value")
Pipeline = Any
Decide = Callable[[Pipeline], Value]


class RedisLink:
    """A connection; raises ValueError for what is no Redis URL."""

    def __init__(self, url: str) -> None:
        self.redis: Any = redis.Redis.from_url(
            url, socket_timeout=WAIT_S, socket_connect_timeout=WAIT_S, decode_responses=False
        )

    def next_number(self) -> int:
        """Return a number that grows; one that is not used leaves a hole that nobody sees."""
        return int(self.redis.incr(key("seq")))

    def change(self, decide: Decide[Value], *watched: str) -> Value:
        """Return what `decide` returns, once the changes that it queued are made.

        It reads before it calls `multi`, and is asked anew if what is watched changes meanwhile.
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
        """Return a part of the list whose ids are in the sorted set `ids_key`."""
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
    """Return the record that was written as `text`, if there is one."""
    return None if text is None else msgspec.json.decode(text, type=kind)


@contextmanager
def translated() -> Iterator[None]:
    """Turn what Redis says into `StorageError`."""
    try:
        yield
    except OutOfMemoryError as error:
        raise StorageFullError("the Redis of the batch store is full.") from error
    except RedisError as error:
        raise StorageError(f"the Redis of the batch store does not work: {error}.") from error
