"""Stored answers for `Idempotency-Key`, shared by the gateway processes of one port without Redis.

A client's second request may reach another process than its first. The answers are in a SQLite file
that the parent of the processes removes. A claim belongs to a process, and ends with it. Has the
methods of `IdempotencyCache`, which a gateway without siblings uses; `shared_idempotency` calls it.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import structlog

from gateway.admission.idempotency import (
    ANSWER_BYTES_MAX,
    BYTES_MAX,
    KEYS_MAX,
    RETENTION_S,
    StoredAnswer,
    being_answered,
    used_for_another,
)
from gateway.errors import ApiError

LOCK_WAIT_S: Final = 0.04
"""Longest wait for a sibling that uses the file: as long as a request waits for Redis."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS answers (
    tenant TEXT, key TEXT, request BLOB, pid INTEGER, until_s REAL, answer BLOB,
    PRIMARY KEY (tenant, key)) WITHOUT ROWID
"""

# Both are about a claim of this process.
DROP: Final = "DELETE FROM answers WHERE tenant = ? AND key = ? AND pid = ? AND answer IS NULL"
ANSWER: Final = (
    "UPDATE answers SET answer = ? WHERE tenant = ? AND key = ? AND pid = ? AND answer IS NULL"
)

TRIM_EVERY: Final = 16
"""Stored answers after which the oldest are dropped: it takes a look at each."""

log = structlog.get_logger(__name__)
_decode = msgspec.msgpack.Decoder(StoredAnswer).decode


class SiblingAnswers:
    """One process's view of the answers; open it after the fork."""

    def __init__(self, file: Path) -> None:
        """Open the file, or make it; raises OSError if it cannot be used."""
        try:
            self._db = sqlite3.connect(file, timeout=LOCK_WAIT_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = MEMORY")
            self._db.execute("PRAGMA synchronous = OFF")  # Nobody reads it after a crash.
            self._db.execute(SCHEMA)
        except sqlite3.Error as error:
            raise OSError(f"run_dir: gateways cannot share answers in {file} ({error}).") from error
        file.chmod(0o600)
        self._stored = 0

    def has(self, place: tuple[str, str], now_s: float) -> bool:
        """Return whether a request with this tenant and key began and is not forgotten."""
        try:
            found = self._row(place)
        except sqlite3.Error:
            return False
        return found is not None and (found[3] is None or now_s < found[2])

    def begin(
        self, tenant: str, key: str, request: bytes, now_s: float
    ) -> StoredAnswer | ApiError | None:
        """Return the stored answer or an error; after None, answer it and call `end`.

        A file that cannot be used costs a repeated request a second answer, and nothing else.
        """
        try:
            with self._alone():
                return self._begin((tenant, key), request, now_s)
        except sqlite3.Error as error:
            log.warning("sibling_answers_away", error=str(error))
            return None

    def end(self, tenant: str, key: str, answer: StoredAnswer | None) -> None:
        """Store the answer; without a storable one, the next request with the key is a new one."""
        mine = (tenant, key, os.getpid())
        try:
            with self._alone():
                if answer is None or len(answer.body) > ANSWER_BYTES_MAX:
                    self._db.execute(DROP, mine)
                    return
                self._db.execute(ANSWER, (msgspec.msgpack.encode(answer), *mine))
                self._stored += 1
                if self._stored % TRIM_EVERY == 0:
                    self._forget_oldest()
        except sqlite3.Error as error:
            log.warning("sibling_answers_away", error=str(error))

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _begin(
        self, place: tuple[str, str], request: bytes, now_s: float
    ) -> StoredAnswer | ApiError | None:
        found = self._row(place)
        if found is not None:
            owned, pid, until_s, packed = found
            is_over = now_s >= until_s if packed is not None else not _lives(pid)
            if not is_over:
                if owned != request:
                    return used_for_another()
                return being_answered() if packed is None else _decode(packed)
        self._db.execute(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, NULL)",
            (*place, request, os.getpid(), now_s + RETENTION_S),
        )
        return None

    def _row(self, place: tuple[str, str]) -> tuple[bytes, int, float, bytes | None] | None:
        text = "SELECT request, pid, until_s, answer FROM answers WHERE tenant = ? AND key = ?"
        found: tuple[bytes, int, float, bytes | None] | None = self._db.execute(
            text, place
        ).fetchone()
        return found

    def _forget_oldest(self) -> None:
        """Drop all answers but the newest that fit; the oldest are the first that are due to go."""
        rows = self._db.execute(
            "SELECT tenant, key, length(answer) FROM answers WHERE answer IS NOT NULL "
            "ORDER BY until_s DESC"
        )
        total = 0
        for number, (tenant, key, size) in enumerate(rows.fetchall(), 1):
            total += size
            if total > BYTES_MAX or number > KEYS_MAX:
                self._db.execute("DELETE FROM answers WHERE tenant = ? AND key = ?", (tenant, key))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the file's lock; what fails in between leaves no trace."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
