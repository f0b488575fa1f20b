"""Stores the records of files and batches and the results of lines; one interface, two stores.

`SqliteStore` is for gateways of one machine, `RedisStore` for several. Every method is one
transaction and may be repeated after a crash. Methods block; `StoreCalls` runs them in a separate
thread. Claims are fenced: after another gateway has claimed a batch, writes of the former one are
refused, so leases need no exact clocks.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gateway.batches.lines import Result
from gateway.batches.terms import BatchRecord, FileRecord

Value = TypeVar("Value")
Record = TypeVar("Record", FileRecord, BatchRecord)


class StorageError(Exception):
    """The store or the disk cannot be used now; nothing was changed."""


class StorageFullError(StorageError):
    """The disk or the Redis of the store is full."""


class LeaseLostError(Exception):
    """Another gateway has the batch, or it no longer exists."""


class TooManyError(Exception):
    """A tenant has reached a limit, which the message names."""


class FileInUseError(Exception):
    """A batch that has not ended needs the file."""


class UnknownFileError(Exception):
    """This tenant has no such file."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch that only this gateway runs, while it renews the claim."""

    batch: BatchRecord
    fence: int
    """Grows with each claim of the batch."""


@dataclass(frozen=True, slots=True)
class Page(Generic[Record]):
    """A page of a list, newest first unless asked otherwise."""

    records: tuple[Record, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class PageWanted:
    """The wanted page of a list."""

    limit: int = 20
    after: str | None = None
    """The id just before the page."""
    oldest_first: bool = False
    purpose: str | None = None


class BatchStore(Protocol):
    """Stores records. Any method may raise `StorageError`."""

    def add_file(self, record: FileRecord) -> None:
        """Add a file; raises `TooManyError`."""

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return a tenant's file."""

    def files(self, tenant: str, wanted: PageWanted) -> Page[FileRecord]:
        """Return a page of a tenant's files."""

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a file's record; False if there is none. Raises `FileInUseError`."""

    def add_batch(self, record: BatchRecord) -> None:
        """Add a batch; raises `TooManyError` or `UnknownFileError`."""

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Return a tenant's batch."""

    def batches(self, tenant: str, wanted: PageWanted) -> Page[BatchRecord]:
        """Return a page of a tenant's batches."""

    def cancel(self, tenant: str, batch_id: str, now_s: int) -> BatchRecord | None:
        """Begin to cancel a batch; raises `NotAllowedError` if it has ended otherwise."""

    def claim(self, owner: str, now_s: float, lease_s: float) -> Claim | None:
        """Claim an unfinished batch that no gateway holds.

        Takes the oldest batch of the tenant with the fewest held ones.
        """

    def renew(self, claim: Claim, now_s: float, lease_s: float) -> BatchRecord:
        """Extend a claim and return the batch's record; raises `LeaseLostError`."""

    def release(self, claim: Claim) -> None:
        """Give a batch up, if it is still held."""

    def record(self, claim: Claim, results: Sequence[Result]) -> BatchRecord:
        """Store and count results of lines, ignoring lines that have one already.

        Raises `LeaseLostError`. A batch that is not in progress takes none.
        """

    def recorded(self, batch_id: str) -> list[int]:
        """Return the numbers of the lines that have a result, in order."""

    def results(self, batch_id: str, after: int, limit: int) -> list[Result]:
        """Return at most `limit` results of the lines after number `after`, in order."""

    def put(self, claim: Claim, record: BatchRecord, files: Sequence[FileRecord] = ()) -> None:
        """Replace a batch's record by its next one and add its files.

        Raises `LeaseLostError`, also if the batch's status has changed since the claim's record. A
        batch that has ended loses its results.
        """

    def expired_files(self, now_s: int, limit: int) -> list[FileRecord]:
        """Return at most `limit` expired files that no unfinished batch needs."""

    def delete_old_batches(self, ended_before_s: int) -> int:
        """Delete ended batches created before `ended_before_s`; return how many."""

    def knows_file(self, file_id: str) -> bool:
        """Return whether a file of any tenant has this id."""

    def close(self) -> None:
        """Close the store."""


class StoreCalls:
    """Calls a store's methods in one thread, one after another."""

    def __init__(self, open_store: Callable[[], BatchStore]) -> None:
        """Open the store at the first call, and at the next one if that fails."""
        self._open = open_store
        self._store: BatchStore | None = None
        self._thread = ThreadPoolExecutor(1, "batch-store")

    async def call(
        self,
        method: Callable[[BatchStore], Value],
    ) -> Value:
        """Return what `method` returns for the store; raises what it raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._call, method)

    def call_here(self, method: Callable[[BatchStore], Value]) -> Value:
        """Do the same from another thread, which blocks."""
        return self._thread.submit(self._call, method).result()

    def _call(self, method: Callable[[BatchStore], Value]) -> Value:
        if self._store is None:
            self._store = self._open()
        return method(self._store)

    async def close(self) -> None:
        """Finish running calls and close the store."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
