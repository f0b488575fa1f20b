"""What a soak looks at, and when it finds a leak. Pure but for `sample`, which reads /proc.

A process that was started again is another one: only what one process does over its life counts,
behind the first part of it, in which caches fill.
"""

import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression

import psutil

WARM_S = 120.0
"""Of each process' life; what it grows in that time is no leak."""
JUDGED_S = 180.0
"""A shorter life behind the warm part says nothing of a slope."""
OWN_MIB_PER_MINUTE_MAX = 1.0
FILES_PER_MINUTE_MAX = 0.5
THREADS_PER_MINUTE_MAX = 0.2
POOLED_THREADS = (multiprocessing.cpu_count() + 1) // 2
"""vLLM compiles grammars in a pool of so many threads, each of which begins when as many grammars
are wanted at once for the first time: on many cores long behind the warm part."""
SHARED_MEMORY = Path("/dev/shm")
DEVICE_MIB_MAX = 256
"""What a GPU may have more in use than at the start: workspaces that came with first uses."""
MIB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one time, in seconds since the start."""

    at_s: float
    own_bytes: int
    """Resident memory that is not shared. KV and boards are shared between ranks: of these a rank
    has more resident with each page that it touches for the first time, up to their fixed sizes."""
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Slopes:
    """What a process gained per minute behind its warm part, and over how many minutes."""

    minutes: float
    own_mib: float
    files: float
    threads: float

    @property
    def leaks(self) -> list[str]:
        """Which of them are too much."""
        limits = (
            ("memory", self.own_mib, OWN_MIB_PER_MINUTE_MAX),
            ("files", self.files, FILES_PER_MINUTE_MAX),
            ("threads", self.threads, max(THREADS_PER_MINUTE_MAX, POOLED_THREADS / self.minutes)),
        )
        return [name for name, slope, limit in limits if slope > limit]


def slopes(samples: Sequence[Sample]) -> Slopes | None:
    """Fit lines; None if the process did not live long enough to be judged."""
    warm = [each for each in samples if each.at_s - samples[0].at_s >= WARM_S]
    if len(warm) < 3 or warm[-1].at_s - warm[0].at_s < JUDGED_S:
        return None
    minutes = [each.at_s / 60 for each in warm]

    def slope(values: Iterable[float]) -> float:
        return linear_regression(minutes, list(values)).slope

    return Slopes(
        minutes[-1] - minutes[0],
        slope(each.own_bytes / MIB for each in warm),
        slope(each.files for each in warm),
        slope(each.threads for each in warm),
    )


def sample(process: psutil.Process, at_s: float) -> Sample | None:
    """Read one process; None if it has ended."""
    try:
        with process.oneshot():
            memory = process.memory_info()
            own = memory.rss - memory.shared
            return Sample(at_s, own, process.num_fds(), process.num_threads())
    except psutil.Error:
        return None


def memory_kept(before: Sequence[int], after: Sequence[int]) -> list[str]:
    """GPUs that have more in use than at the start, both times idle in dp."""
    return [
        f"GPU {number}: {now} MiB in use, {then} at the start"
        for number, (then, now) in enumerate(zip(before, after, strict=True))
        if now - then > DEVICE_MIB_MAX
    ]


def segments() -> frozenset[str]:
    """The names of all shared-memory segments."""
    return frozenset(path.name for path in SHARED_MEMORY.iterdir())


def pages_lost(
    before: Mapping[int, Mapping[str, int]], after: Mapping[int, Mapping[str, int]]
) -> list[str]:
    """Ranks whose pages are not where they were at the start, both times idle in dp."""
    lost = []
    for rank, pages in before.items():
        if rank not in after:
            lost.append(f"rank {rank}: it is not there")
            continue
        changed = [key for key, count in pages.items() if after[rank][key] != count]
        lost += [f"rank {rank}: {after[rank][key]} {key}, not {pages[key]}" for key in changed]
    return lost
