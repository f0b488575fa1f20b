"""The store in one SQLite file, for all gateways of a machine.

Write-ahead logging with a sync per transaction: acknowledged changes survive a power cut, and a
killed process leaves no partial change. Called in one thread per process.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.batches import terms
from gateway.batches.content import storage_error
from gateway.batches.lines import Result, with_results
from gateway.batches.store import (
    Claim,
    FileInUseError,
    LeaseLostError,
    Page,
    PageWanted,
    StorageError,
    StorageFullError,
    TooManyError,
    UnknownFileError,
)
from gateway.batches.terms import BatchRecord, FileRecord, Status

BUSY_WAIT_S = 10.0
"""Longest wait of a transaction for those of other processes."""

BUSY_PAUSE_S = 0.02

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX files_of_tenant ON files (tenant, seq);
CREATE INDEX files_by_end ON files (expires_at);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL,
    input TEXT NOT NULL, created_at INTEGER NOT NULL, open INTEGER NOT NULL, record BLOB NOT NULL,
    fence INTEGER NOT NULL DEFAULT 0, owner TEXT NOT NULL DEFAULT '',
    leased_until REAL NOT NULL DEFAULT 0
);
CREATE INDEX batches_of_tenant ON batches (tenant, seq);
CREATE INDEX batches_open ON batches (open, seq);
CREATE TABLE results (
    batch TEXT NOT NULL, line INTEGER NOT NULL, result BLOB NOT NULL, PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""
_CLAIMABLE = """
SELECT b.record, b.fence FROM batches b WHERE b.open = 1 AND b.leased_until <= :now ORDER BY (
    SELECT count(*) FROM batches o
    WHERE o.open = 1 AND o.tenant = b.tenant AND o.leased_until > :now
), b.seq LIMIT 1
"""

Record = TypeVar("Record", FileRecord, BatchRecord)


class SqliteStore:
    """Stores everything in the file at `path`; raises `StorageError` if it cannot be used."""

    def __init__(self, path: Path) -> None:
        with _translated():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                path, timeout=BUSY_WAIT_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._database.close()
                raise

    def _prepare(self) -> None:
        self._use_write_ahead_log()
        self._database.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            (version,) = self._one("PRAGMA user_version")
            if version not in (0, SCHEMA_VERSION):
                raise StorageError(
                    f"the batch store has version {version}, this gateway uses {SCHEMA_VERSION}: "
                    "set another batches.data_dir."
                )
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    self._database.execute(statement)
                self._database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _use_write_ahead_log(self) -> None:
        """Switch the journal mode, with retries: SQLite does not wait for other processes here."""
        until_s = time.monotonic() + BUSY_WAIT_S
        while True:
            try:
                self._database.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(BUSY_PAUSE_S)
            else:
                return

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def add_file(self, record: FileRecord) -> None:
        """Add a file."""
        with self._transaction():
            self._add_file(record)
            count, total = self._one(
                "SELECT count(*), coalesce(sum(bytes), 0) FROM files WHERE tenant = ?",
                record.tenant,
            )
            if count > terms.FILES_PER_TENANT_MAX:
                raise TooManyError(f"{terms.FILES_PER_TENANT_MAX} files")
            if total > terms.BYTES_PER_TENANT_MAX:
                raise TooManyError(f"{terms.BYTES_PER_TENANT_MAX} bytes in files")

    def _add_file(self, record: FileRecord) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO files (id, tenant, purpose, bytes, expires_at, record)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (
                *(record.id, record.tenant, record.purpose, record.bytes, record.expires_at),
                msgspec.json.encode(record),
            ),
        )

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return a tenant's file."""
        with self._transaction(writes=False):
            return self._file(tenant, file_id)

    def _file(self, tenant: str, file_id: str) -> FileRecord | None:
        row = self._one(
            "SELECT record FROM files WHERE id = ? AND tenant = ?", file_id, tenant, is_there=False
        )
        return msgspec.json.decode(row[0], type=FileRecord) if row else None

    def files(self, tenant: str, wanted: PageWanted) -> Page[FileRecord]:
        """Return a page of a tenant's files."""
        return self._page("files", tenant, wanted, FileRecord)

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a file's record."""
        with self._transaction():
            if self._file(tenant, file_id) is None:
                return False
            used = "SELECT 1 FROM batches WHERE open = 1 AND input = ?"
            if self._one(used, file_id, is_there=False):
                raise FileInUseError
            self._database.execute("DELETE FROM files WHERE id = ?", (file_id,))
            return True

    def knows_file(self, file_id: str) -> bool:
        """Return whether a file of any tenant has this id."""
        with self._transaction(writes=False):
            return bool(self._one("SELECT 1 FROM files WHERE id = ?", file_id, is_there=False))

    def expired_files(self, now_s: int, limit: int) -> list[FileRecord]:
        """Return expired files that no unfinished batch needs."""
        with self._transaction(writes=False):
            rows = self._database.execute(
                "SELECT record FROM files f WHERE expires_at <= ? AND NOT EXISTS"
                " (SELECT 1 FROM batches b WHERE b.open = 1 AND b.input = f.id) LIMIT ?",
                (now_s, limit),
            ).fetchall()
        return [msgspec.json.decode(row[0], type=FileRecord) for row in rows]

    def add_batch(self, record: BatchRecord) -> None:
        """Add a batch."""
        with self._transaction():
            if self._file(record.tenant, record.input_file_id) is None:
                raise UnknownFileError
            count = "SELECT count(*) FROM batches WHERE open = 1 AND tenant = ?"
            if self._one(count, record.tenant)[0] >= terms.BATCHES_UNFINISHED_MAX:
                raise TooManyError(f"{terms.BATCHES_UNFINISHED_MAX} unfinished batches")
            self._database.execute(
                "INSERT INTO batches (id, tenant, input, created_at, open, record)"
                " VALUES (?, ?, ?, ?, 1, ?)",
                (
                    *(record.id, record.tenant, record.input_file_id, record.created_at),
                    msgspec.json.encode(record),
                ),
            )

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Return a tenant's batch."""
        with self._transaction(writes=False):
            return self._batch(tenant, batch_id)

    def _batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        query = "SELECT record FROM batches WHERE id = ? AND tenant = ?"
        row = self._one(query, batch_id, tenant, is_there=False)
        return msgspec.json.decode(row[0], type=BatchRecord) if row else None

    def batches(self, tenant: str, wanted: PageWanted) -> Page[BatchRecord]:
        """Return a page of a tenant's batches."""
        return self._page("batches", tenant, wanted, BatchRecord)

    def cancel(self, tenant: str, batch_id: str, now_s: int) -> BatchRecord | None:
        """Begin to cancel a batch."""
        with self._transaction():
            before = self._batch(tenant, batch_id)
            if before is None:
                return None
            after = terms.cancelling(before, now_s)
            self._write(after)
            return after

    def claim(self, owner: str, now_s: float, lease_s: float) -> Claim | None:
        """Claim an unfinished batch that no gateway holds."""
        with self._transaction():
            row = self._database.execute(_CLAIMABLE, {"now": now_s}).fetchone()
            if row is None:
                return None
            claim = Claim(msgspec.json.decode(row[0], type=BatchRecord), row[1] + 1)
            self._database.execute(
                "UPDATE batches SET fence = ?, owner = ?, leased_until = ? WHERE id = ?",
                (claim.fence, owner, now_s + lease_s, claim.batch.id),
            )
            return claim

    def renew(self, claim: Claim, now_s: float, lease_s: float) -> BatchRecord:
        """Extend a claim and return the batch's record."""
        with self._transaction():
            batch = self._held(claim)
            self._database.execute(
                "UPDATE batches SET leased_until = ? WHERE id = ?", (now_s + lease_s, batch.id)
            )
            return batch

    def release(self, claim: Claim) -> None:
        """Give a batch up."""
        with self._transaction():
            self._database.execute(
                "UPDATE batches SET leased_until = 0, owner = '' WHERE id = ? AND fence = ?",
                (claim.batch.id, claim.fence),
            )

    def record(self, claim: Claim, results: Sequence[Result]) -> BatchRecord:
        """Store and count results of lines."""
        with self._transaction():
            batch = self._held(claim)
            if batch.status is not Status.IN_PROGRESS:
                return batch
            new = []
            for result in results:
                changes = self._database.execute(
                    "INSERT OR IGNORE INTO results VALUES (?, ?, ?)",
                    (batch.id, result.number, msgspec.msgpack.encode(result)),
                )
                if changes.rowcount:
                    new.append(result)
            batch = with_results(batch, new)
            self._write(batch)
            return batch

    def recorded(self, batch_id: str) -> list[int]:
        """Return the numbers of the lines that have a result."""
        with self._transaction(writes=False):
            query = "SELECT line FROM results WHERE batch = ? ORDER BY line"
            return [row[0] for row in self._database.execute(query, (batch_id,))]

    def results(self, batch_id: str, after: int, limit: int) -> list[Result]:
        """Return at most `limit` results of the lines after number `after`."""
        query = "SELECT result FROM results WHERE batch = ? AND line > ? ORDER BY line LIMIT ?"
        with self._transaction(writes=False):
            rows = self._database.execute(query, (batch_id, after, limit)).fetchall()
        return [msgspec.msgpack.decode(row[0], type=Result) for row in rows]

    def put(self, claim: Claim, record: BatchRecord, files: Sequence[FileRecord] = ()) -> None:
        """Replace a batch's record by its next one and add its files."""
        with self._transaction():
            if self._held(claim).status is not claim.batch.status:
                raise LeaseLostError
            self._write(record)
            for file in files:
                self._add_file(file)
            if record.has_ended:
                self._database.execute("DELETE FROM results WHERE batch = ?", (record.id,))

    def delete_old_batches(self, ended_before_s: int) -> int:
        """Delete ended batches created before `ended_before_s`."""
        with self._transaction():
            return self._database.execute(
                "DELETE FROM batches WHERE open = 0 AND created_at < ?", (ended_before_s,)
            ).rowcount

    def _held(self, claim: Claim) -> BatchRecord:
        query = "SELECT record FROM batches WHERE id = ? AND fence = ?"
        row = self._one(query, claim.batch.id, claim.fence, is_there=False)
        if not row:
            raise LeaseLostError
        return msgspec.json.decode(row[0], type=BatchRecord)

    def _write(self, record: BatchRecord) -> None:
        self._database.execute(
            "UPDATE batches SET record = ?, open = ? WHERE id = ?",
            (msgspec.json.encode(record), not record.has_ended, record.id),
        )

    def _page(
        self, table: str, tenant: str, wanted: PageWanted, kind: type[Record]
    ) -> Page[Record]:
        order, beyond = ("ASC", ">") if wanted.oldest_first else ("DESC", "<")
        where = "tenant = ?"
        values: list[object] = [tenant]
        if wanted.purpose is not None:
            where += " AND purpose = ?"
            values.append(wanted.purpose)
        if wanted.after is not None:
            # Here and below, only our own names go into the query's text.
            where += f" AND seq {beyond} (SELECT seq FROM {table} WHERE id = ?)"  # noqa: S608
            values.append(wanted.after)
        query = f"SELECT record FROM {table} WHERE {where} ORDER BY seq {order} LIMIT ?"  # noqa: S608
        with self._transaction(writes=False):
            rows = self._database.execute(query, (*values, wanted.limit + 1)).fetchall()
        records = [msgspec.json.decode(row[0], type=kind) for row in rows[: wanted.limit]]
        return Page(tuple(records), len(rows) > wanted.limit)

    def _one(self, query: str, *values: object, is_there: bool = True) -> Any:
        row = self._database.execute(query, values).fetchone()
        assert row is not None or not is_there
        return row

    @contextmanager
    def _transaction(self, *, writes: bool = True) -> Iterator[None]:
        with _translated():
            # After the write lock is taken, no later statement can fail for it.
            self._database.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise


@contextmanager
def _translated() -> Iterator[None]:
    """Turn errors of SQLite and the disk into `StorageError`."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
            raise StorageFullError("the disk of the batch store is full.") from error
        raise StorageError(f"the batch store does not work: {error}.") from error
    except OSError as error:
        raise storage_error(error) from error
