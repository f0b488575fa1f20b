"""What keeps files' and batches' records and the results of lines; one interface, two stores.

`SqliteStore` is for gateways of one machine, `RedisStore` for several. Every method is one
transaction and may be called again after a crash. Methods block: `StoreCalls` runs them in a thread
of their own. A claim is fenced: once another gateway has taken a batch over, nothing that the
former one writes counts, so leases need no exact clocks.
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
    """There is no room left."""


class LeaseLostError(Exception):
    """Another gateway has the batch, or it does not exist any more."""


class TooManyError(Exception):
    """A tenant has as much as it may have; the message says of what."""


class FileInUseError(Exception):
    """A batch that has not ended needs the file."""


class UnknownFileError(Exception):
    """There is no such file of this tenant."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch that this gateway alone runs, as long as it renews the claim."""

    batch: BatchRecord
    fence: int
    """Grows with each claim of the batch."""


@dataclass(frozen=True, slots=True)
class Page(Generic[Record]):
    """A part of a list, newest first unless asked otherwise."""

    records: tuple[Record, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class PageWanted:
    """Which part of a list is wanted."""

    limit: int = 20
    after: str | None = None
    """The id that stands before the part."""
    oldest_first: bool = False
    purpose: str | None = None


class BatchStore(Protocol):
    """Keeps records. Any method may raise `StorageError`."""

    def add_file(self, record: FileRecord) -> None:
        """Add a file; raises `TooManyError`."""

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return a tenant's file."""

    def files(self, tenant: str, wanted: PageWanted) -> Page[FileRecord]:
        """Return a part of a tenant's files."""

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Forget a file; False if there is none. Raises `FileInUseError`."""

    def add_batch(self, record: BatchRecord) -> None:
        """Add a batch; raises `TooManyError` or `UnknownFileError`."""

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Return a tenant's batch."""

    def batches(self, tenant: str, wanted: PageWanted) -> Page[BatchRecord]:
        """Return a part of a tenant's batches."""

    def cancel(self, tenant: str, batch_id: str, now_s: int) -> BatchRecord | None:
        """Begin to cancel a batch; raises `NotAllowedError` if it has ended otherwise."""

    def claim(self, owner: str, now_s: float, lease_s: float) -> Claim | None:
        """Take an unfinished batch that nobody holds, the tenant with the fewest held ones first.

        Of one tenant's the oldest.
        """

    def renew(self, claim: Claim, now_s: float, lease_s: float) -> BatchRecord:
        """Keep a batch and return what it is now; raises `LeaseLostError`."""

    def release(self, claim: Claim) -> None:
        """Let the next one have a batch, if it is still held."""

    def record(self, claim: Claim, results: Sequence[Result]) -> BatchRecord:
        """Keep results of lines and count them; those of lines that have one are left out.

        Raises `LeaseLostError`. A batch that is not in progress any more takes none.
        """

    def recorded(self, batch_id: str) -> list[int]:
        """Return the numbers of the lines that have a result, in order."""

    def results(self, batch_id: str, after: int, limit: int) -> list[Result]:
        """Return up to `limit` results of the lines behind number `after`, in order."""

    def put(self, claim: Claim, record: BatchRecord, files: Sequence[FileRecord] = ()) -> None:
        """Replace a batch's record by its next one and add its files.

        Raises `LeaseLostError`, also if the batch was changed since the record was read. A batch
        that has ended loses its results.
        """

    def expired_files(self, now_s: int, limit: int) -> list[FileRecord]:
        """Return files whose time is over and that no unfinished batch needs."""

    def delete_old_batches(self, ended_before_s: int) -> int:
        """Forget batches that were created before; return how many."""

    def knows_file(self, file_id: str) -> bool:
        """Say whether a file of any tenant has this id."""

    def close(self) -> None:
        """Close the store."""


class StoreCalls:
    """Calls a store's methods in one thread, one after another."""

    def __init__(self, open_store: Callable[[], BatchStore]) -> None:
        """The store is opened at the first call, and again at the next if that fails."""
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
        """The same for a thread of one's own, which waits."""
        return self._thread.submit(self._call, method).result()

    def _call(self, method: Callable[[BatchStore], Value]) -> Value:
        if self._store is None:
            self._store = self._open()
        return method(self._store)

    async def close(self) -> None:
        """Finish what is under way and close the store."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
