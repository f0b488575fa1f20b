"""The display of `aileron up`: bars while ranks load on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

STAGE_WORDS = {
    "weights": "loading weights",
    "modes": "preparing modes",
    "communicators": "creating communicators",
    "graphs": "capturing CUDA graphs",
    "kv": "allocating KV pages",
    "warm": "warming up",
    "ready": "ready",
}
"""Stage that a rank reports -> its text; an unknown stage is shown as it is."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far one rank has loaded; `total` is 0 if the amount is unknown."""

    rank: int
    stage: str
    done: int
    total: int

    @property
    def words(self) -> str:
        """The stage in words."""
        return STAGE_WORDS.get(self.stage, self.stage)


def read_rank_progress(fields: Mapping[str, Any]) -> RankProgress | None:
    """Return the progress in a child's JSON line; None for any other line."""
    if fields.get("event") != "rank_progress":
        return None
    rank, stage = fields.get("rank"), fields.get("stage")
    done, total = fields.get("done") or 0, fields.get("total") or 0
    if not isinstance(rank, int) or not isinstance(stage, str):
        return None
    if not isinstance(done, int) or not isinstance(total, int):
        return None
    return RankProgress(rank, stage, done, total)


class Screen(Protocol):
    """The display of `up`; a context manager while the cell loads."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

    def say(self, text: str) -> None:
        """Show one line."""

    def rank(self, progress: RankProgress) -> None:
        """Show the progress of a rank."""

    def loaded(self) -> None:
        """Remove the bars: everything serves."""


class PlainScreen:
    """Lines with the elapsed seconds; one line per stage, not per step."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._stages: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def say(self, text: str) -> None:
        """Print `text` after the elapsed seconds."""
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)

    def rank(self, progress: RankProgress) -> None:
        """Print a stage once."""
        if self._stages.get(progress.rank) != progress.stage:
            self._stages[progress.rank] = progress.stage
            self.say(f"rank {progress.rank}: {progress.words}")

    def loaded(self) -> None:
        """Do nothing: there are no bars."""


class BarScreen:
    """One bar per rank on a terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[who]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._bars: dict[int, TaskID] = {}
        self._import_bar = self._progress.add_task("importing vLLM", who="engine", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print `text` above the bars."""
        self._progress.console.print(text, markup=False, highlight=False)

    def rank(self, progress: RankProgress) -> None:
        """Move the rank's bar."""
        bar = self._bars.get(progress.rank)
        if bar is None:
            self._progress.update(self._import_bar, visible=False)
            bar = self._progress.add_task("", who=f"rank {progress.rank}", total=None)
            self._bars[progress.rank] = bar
        ready = progress.stage == "ready"
        self._progress.update(
            bar,
            description=progress.words,
            total=1 if ready else progress.total or None,
            completed=1 if ready else progress.done,
        )

    def loaded(self) -> None:
        """Remove the bars."""
        self._progress.stop()


def open_screen() -> Screen:
    """Return the screen that fits standard output."""
    if sys.stdout.isatty():
        return BarScreen(Console(file=sys.stdout))
    return PlainScreen()
