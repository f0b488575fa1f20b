"""The bytes of files in the data folder: written under a temporary name, synced, renamed.

No reader ever sees part of a file, and a full disk leaves none. Bytes are appended in threads. The
gateway makes all ids, clients none, so a name is always safe.
"""

import asyncio
import codecs
import errno
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from gateway.batches.store import StorageError, StorageFullError

READ_BYTES = 256 * 1024
"""Bytes of a file that are read at once."""
TEMPORARY = ".part"
ABANDONED_AFTER_S = 6 * 3_600
"""Age at which a temporary file, or a file without a record, counts as abandoned."""

_ID = re.compile(r"file-[0-9a-z]{24,40}")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def new_id(prefix: str) -> str:
    """Return a new id, such as file-… or batch_…."""
    return prefix + secrets.token_hex(16)


def storage_error(error: OSError) -> StorageError:
    """Convert the disk's error; `StorageFullError` if the disk is full."""
    if error.errno in _FULL:
        return StorageFullError("the disk of the batch files is full.")
    return StorageError(f"the batch files cannot be used: {error.strerror}.")


class Part:
    """A file that is being written; removed unless `keep` is called."""

    def __init__(self, folder: Path) -> None:
        """Open it; raises `StorageError`."""
        self._folder = folder
        self._path = folder / f"{secrets.token_hex(16)}{TEMPORARY}"
        self.bytes = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file: IO[bytes] = self._path.open("xb")
        except OSError as error:
            raise storage_error(error) from error

    def write(self, data: bytes) -> None:
        """Append bytes; raises `StorageError`."""
        try:
            self._file.write(data)
        except OSError as error:
            raise storage_error(error) from error
        self.bytes += len(data)

    def keep(self, file_id: str) -> None:
        """Make it the file with this id, complete and synced; raises `StorageError`."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._path.rename(self._folder / file_id)
            _sync_folder(self._folder)
        except OSError as error:
            raise storage_error(error) from error

    def drop(self) -> None:
        """Remove it, unless `keep` has renamed it."""
        with suppress(OSError):
            # Buffered bytes may no longer fit on the disk; they are not needed.
            self._file.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


class Content:
    """The folder of files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self) -> Part:
        """Begin a file; raises `StorageError`."""
        return Part(self._folder)

    def path(self, file_id: str) -> Path:
        """Return the path of a file's bytes."""
        assert _ID.fullmatch(file_id), "the gateway makes all ids."
        return self._folder / file_id

    def delete(self, file_id: str) -> None:
        """Delete a file's bytes, if they exist; raises `StorageError`."""
        try:
            self.path(file_id).unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error) from error

    async def read(self, file_id: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes; raises `StorageError`."""
        file = await asyncio.to_thread(self._open, file_id)
        try:
            while data := await asyncio.to_thread(_read, file):
                yield data
        finally:
            file.close()

    def _open(self, file_id: str) -> IO[bytes]:
        try:
            return self.path(file_id).open("rb")
        except OSError as error:
            raise storage_error(error) from error

    def abandoned(self, now_s: float) -> Iterator[str]:
        """Delete old temporary files; yield other old names, to be checked against the records."""
        with suppress(OSError):
            for path in self._folder.iterdir():
                try:
                    is_old = path.stat().st_mtime < now_s - ABANDONED_AFTER_S
                except OSError:
                    continue
                if is_old and path.suffix == TEMPORARY:
                    path.unlink(missing_ok=True)
                elif is_old and _ID.fullmatch(path.name):
                    yield path.name


def scan(path: Path, take: Callable[[bytes, int], bool], line_bytes_max: int) -> None:
    """Call `take` with each line of a file and its first byte's offset, until it returns False.

    The first line begins after a byte order mark, which editors on Windows write. A line longer
    than the limit is cut one byte after the limit. Raises `StorageError`.
    """
    try:
        with path.open("rb") as file:
            mark = codecs.BOM_UTF8
            start = len(mark) if file.read(len(mark)) == mark else 0
            file.seek(start)
            while line := file.readline(line_bytes_max + 1):
                wanted = take(line, start)
                while not line.endswith(b"\n") and (line := file.readline(line_bytes_max + 1)):
                    pass
                start = file.tell()
                if not wanted:
                    return
    except OSError as error:
        raise storage_error(error) from error


def read_line_at(path: Path, start: int, line_bytes_max: int) -> bytes:
    """Return the line that begins at an offset of a file; raises `StorageError`."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.readline(line_bytes_max + 1)
    except OSError as error:
        raise storage_error(error) from error


def _read(file: IO[bytes]) -> bytes:
    try:
        return file.read(READ_BYTES)
    except OSError as error:
        raise storage_error(error) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
