"""Which processes hold memory of cells: the host's, in files without names, and that of GPUs.

Memory of a cell outlives its ranks, as the launcher keeps it for the next ones. If it outlives the
cell, some process of the cell has not ended.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.cli.hardware import nvidia_smi_lines

PROC = Path("/proc")
COMMAND_CHARS = 60
_CELL_FILE = re.compile(r"/memfd:aileron-")
"""Where links of open files of a cell's memory lead to, and the names of their mappings."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process and the bytes that it holds; cells' files of several processes may be the same."""

    pid: int
    command: str
    host_bytes: int
    device_bytes: int


def memory_holders() -> tuple[Holder, ...]:
    """Return the processes with memory of cells, and those of this program with memory of GPUs.

    Processes of other users count only if this one may look at them.
    """
    on_devices = read_device_bytes(nvidia_smi_lines("--query-compute-apps=pid,used_memory"))
    found = []
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        pid, command = int(folder.name), _command_of(folder)
        host_bytes = sum(_cell_files(folder).values())
        is_ours = host_bytes > 0 or _is_of_this_program(command)
        device_bytes = on_devices[pid] if is_ours else 0
        if host_bytes or device_bytes:
            found.append(Holder(pid, command[:COMMAND_CHARS], host_bytes, device_bytes))
    return tuple(sorted(found, key=lambda each: each.pid))


def _cell_files(folder: Path) -> dict[int, int]:
    """Return the bytes of each file of a cell's memory that a process has open, by its inode."""
    files: dict[int, int] = {}
    for link in _links(folder / "fd"):
        with suppress(OSError):
            if _CELL_FILE.match(str(link.readlink())):
                status = link.stat()
                files[status.st_ino] = status.st_blocks * 512
    return files


def _links(folder: Path) -> Iterator[Path]:
    with suppress(OSError):  # It is another user's, or has just ended.
        yield from folder.iterdir()


def _command_of(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()


def _is_of_this_program(command: str) -> bool:
    return "-m worker" in command or "aileron" in command


def read_device_bytes(listing: str) -> Counter[int]:
    """Read nvidia-smi's lines `pid, MiB`; one for each GPU that a process uses."""
    found: Counter[int] = Counter()
    for line in listing.splitlines():
        pid, _, size = (each.strip() for each in line.partition(","))
        if pid.isdigit() and size.isdigit():
            found[int(pid)] += int(size) * 2**20
    return found
