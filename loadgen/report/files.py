"""Reads and writes report files; every problem is one sentence.

Files are written under a temporary name and then renamed, so that a reader never sees half a
report. Destinations are checked before a run, so that a typing error does not lose its report.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loadgen.errors import UsageError
from loadgen.report.report import SCHEMA, SCHEMA_VERSION

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
WHOLE_REPORT = frozenset(
    {
        *("server", "duration_s", "plan", "generator", "switches", "slos"),
        *("total", "tiers", "phases", "series"),
    }
)


def check_destination(path: Path | None, option: str) -> None:
    """Refuse a file that could not be written later."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder, not a file.")
    if not folder.is_dir():
        raise UsageError(f"{option} {path} cannot be written: there is no folder {folder}.")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written: folder {folder} is read-only.")


def check_plot_destination(path: Path | None, option: str) -> None:
    """Refuse a picture that could not be drawn or written later."""
    check_destination(path, option)
    if path is not None and path.suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(f"{option} {path} must end in one of {', '.join(PLOT_SUFFIXES)}.")
    if path is not None and find_spec("matplotlib") is None:
        raise UsageError(f"{option} needs matplotlib: pip install matplotlib.")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write one JSON document atomically."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file atomically; a failure leaves the old one."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).chmod(0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error


def read_report(path: Path) -> dict[str, Any]:
    """Read a report of this schema; refuse anything else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}.") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise UsageError(f"{path} is not a report of python -m loadgen run.")
    if report.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"{path} has report version {report.get('schema_version')}; "
            f"this loadgen reads version {SCHEMA_VERSION}."
        )
    missing = WHOLE_REPORT - set(report)
    if missing:
        raise UsageError(f"{path} is not a whole report: {', '.join(sorted(missing))} is missing.")
    return report


def write_text(path: Path, text: str) -> None:
    """Write one text atomically."""
    write_bytes(path, text.encode())


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
