"""Whether files have changed since they were last read: what every watcher of a file compares."""

from pathlib import Path

Stamp = tuple[tuple[int, int, int], ...]


def stamp_of(*paths: Path) -> Stamp | None:
    """Return a value that changes with any of the files; None while one of them is away."""
    try:
        states = [path.stat() for path in paths]
    except OSError:
        return None
    return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in states)
