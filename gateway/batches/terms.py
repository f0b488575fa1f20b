"""Records of files and batches: the transitions of a batch, and its form for clients. Pure.

A batch goes VALIDATING -> IN_PROGRESS -> FINALIZING -> COMPLETED or EXPIRED; VALIDATING -> FAILED;
and from VALIDATING or IN_PROGRESS through CANCELLING to CANCELLED. Records are values: a store
holds them, and only `changed` and the functions that call it write a status. Times are Unix
seconds, because records outlive processes and machines.
"""

from enum import StrEnum
from typing import Any, Final

import msgspec

COMPLETION_WINDOW: Final = "24h"
WINDOW_S = 24 * 3_600
"""Time after which the rest of a batch expires."""

FILE_BYTES_MAX = 100 * 1024**2
"""Largest accepted file."""
FILES_PER_TENANT_MAX = 1_000
BYTES_PER_TENANT_MAX = 16 * 1024**3
"""Most bytes of all files of a tenant, including result files."""
BATCHES_UNFINISHED_MAX = 64
"""Most batches of one tenant that have not ended."""
RETENTION_S = 30 * 24 * 3_600
"""Lifetime of files and ended batches, unless a file's own is shorter."""
EXPIRES_AFTER_S_MIN = 3_600
EXPIRES_AFTER_S_MAX = RETENTION_S
FILENAME_CHARS_MAX = 255
METADATA_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512

ENDPOINTS: Final[tuple[str, ...]] = ("/v1/chat/completions", "/v1/completions")
"""Endpoints that the lines of a batch may call."""


class Status(StrEnum):
    """The status of a batch, as OpenAI names it."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


NEXT: Final[dict[Status, frozenset[Status]]] = {
    Status.VALIDATING: frozenset({Status.IN_PROGRESS, Status.FAILED, Status.CANCELLING}),
    Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.CANCELLING}),
    Status.FINALIZING: frozenset({Status.COMPLETED, Status.EXPIRED}),
    Status.CANCELLING: frozenset({Status.CANCELLED}),
    Status.FAILED: frozenset(),
    Status.COMPLETED: frozenset(),
    Status.EXPIRED: frozenset(),
    Status.CANCELLED: frozenset(),
}
"""Status -> possible next ones; none after an end."""

ENDED: Final[frozenset[Status]] = frozenset(status for status, after in NEXT.items() if not after)


class NotAllowedError(Exception):
    """The batch's status does not allow this transition."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file; its bytes are in the data folder, under its id."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def view(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """An error in an input file; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(msgspec.Struct, frozen=True):
    """Lines of a batch; `failed` ones have their line in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        """Lines that have their result."""
        return self.completed + self.failed


class Usage(msgspec.Struct, frozen=True):
    """Tokens of all completed lines."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def view(self) -> dict[str, Any]:
        """Return OpenAI's usage of a batch."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    """Time at which lines without a result expire."""
    key: str = ""
    """The id of the API key that made it; empty without keys and in records of earlier versions."""
    metadata: dict[str, str] | None = None
    files_expire_after_s: int = RETENTION_S
    """Lifetime of the result files."""
    status: Status = Status.VALIDATING
    model: str | None = None
    counts: Counts = Counts()
    usage: Usage = Usage()
    errors: tuple[LineError, ...] = ()
    times: dict[str, int] = {}
    """Status -> when the batch reached it."""
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDED

    def view(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        errors = [msgspec.to_builtins(error) for error in self.errors]
        moments = {f"{status}_at": self.times.get(status) for status in Status if status in _TIMED}
        counts = self.counts
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": COMPLETION_WINDOW,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **moments,
            "request_counts": {
                "total": counts.total,
                "completed": counts.completed,
                "failed": counts.failed,
            },
            "usage": self.usage.view(),
            "metadata": self.metadata,
        }


_TIMED = frozenset(Status) - {Status.VALIDATING}


def changed(batch: BatchRecord, status: Status, now_s: int, **fields: Any) -> BatchRecord:
    """Return the batch in its next status; raises `NotAllowedError` for an invalid transition."""
    if status not in NEXT[batch.status]:
        raise NotAllowedError(f"a batch that is {batch.status} cannot become {status}.")
    times = {**batch.times, status.value: now_s}
    return msgspec.structs.replace(batch, status=status, times=times, **fields)


def validated(batch: BatchRecord, total: int, model: str, now_s: int) -> BatchRecord:
    """Return the batch whose input can be run."""
    return changed(batch, Status.IN_PROGRESS, now_s, counts=Counts(total), model=model)


def failed(batch: BatchRecord, errors: tuple[LineError, ...], now_s: int) -> BatchRecord:
    """Return the batch whose input cannot be run."""
    return changed(batch, Status.FAILED, now_s, errors=errors)


def cancelling(batch: BatchRecord, now_s: int) -> BatchRecord:
    """Return the batch that begins no more lines; a cancelled one stays unchanged."""
    if batch.status in (Status.CANCELLING, Status.CANCELLED):
        return batch
    return changed(batch, Status.CANCELLING, now_s)


def counted(batch: BatchRecord, completed: int, failed: int, usage: Usage) -> BatchRecord:
    """Return the batch with further completed and failed lines counted."""
    assert batch.status is Status.IN_PROGRESS, batch.status
    counts = Counts(
        batch.counts.total, batch.counts.completed + completed, batch.counts.failed + failed
    )
    assert counts.done <= counts.total, counts
    return msgspec.structs.replace(batch, counts=counts, usage=batch.usage + usage)


def ended(
    batch: BatchRecord, now_s: int, *, output_file_id: str | None, error_file_id: str | None
) -> BatchRecord:
    """Return the batch whose files are written; lines without a result count as failed."""
    counts = batch.counts
    if batch.status is Status.CANCELLING:
        status = Status.CANCELLED
    else:
        status = Status.COMPLETED if counts.done == counts.total else Status.EXPIRED
    return changed(
        batch,
        status,
        now_s,
        counts=Counts(counts.total, counts.completed, counts.total - counts.completed),
        output_file_id=output_file_id,
        error_file_id=error_file_id,
    )
