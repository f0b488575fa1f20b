"""The lock on a run's folder: two cells in one folder would write over each other's files.

The kernel releases it when its process ends, however it ends.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import IO

from coordinator.cli.errors import CliError
from coordinator.protocol.folders import words_of

LOCK_NAME = "run.lock"
TEXT_BYTES_MAX = 4_096


def lock_folder(folder: Path, cell: str) -> IO[str]:
    """Return the open lock of a folder, held until it is closed; `cell` tells others what runs.

    Raises `CliError` with the cell that holds it.
    """
    path = folder / LOCK_NAME
    try:
        file = path.open("a+")
    except OSError as error:
        raise CliError(f"run_dir: cannot write {path}: {words_of(error)}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, file):
            # Its holder ended between the two calls and took the file away.
            file.close()
            return lock_folder(folder, cell)
    except OSError as error:
        file.seek(0)
        holder = _words_for(file.read(TEXT_BYTES_MAX))
        file.close()
        raise CliError(
            f"run_dir {folder} is in use by {holder}: stop that one, or set another run_dir."
        ) from error
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "cell": cell}))
    file.flush()
    return file


def release_folder(lock: IO[str]) -> None:
    """Let others use the folder, and leave nothing there."""
    Path(lock.name).unlink(missing_ok=True)
    lock.close()


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False


def _words_for(text: str) -> str:
    try:
        fields = json.loads(text)
        return f"{fields['cell']} (pid {fields['pid']})"
    except (ValueError, TypeError, KeyError):
        return "another cell"
