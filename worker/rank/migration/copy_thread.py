"""The copies of one migration on a rank: a thread launches them and waits until they are over.

The device's next work can queue after them without a host wait. On CPU, where copies and steps need
the same cores, they run inline: waking a thread takes longer than most copies.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from kvadaptor.geometry import Split
from kvadaptor.transfer.move_stats import MoveStats
from kvadaptor.transfer.rounds import Finish, Round
from worker.io.host import Host
from worker.rank.engine import Engine

_Start = tuple[Finish, Callable[[], None]]


class AtOnce(Executor):
    """Runs a submitted call before `submit` returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor`."""
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- it is raised where the result is asked for
            done.set_exception(error)
        return done


class CopyThread:
    """Runs the copies of one migration at a time; used by the rank's main loop alone."""

    def __init__(self, engine: Engine, host: Host, thread: Executor | None = None) -> None:
        """`thread` is that of others, whose copies are over when these begin."""
        self._engine = engine
        self._thread: Executor = thread or AtOnce()
        if thread is None and not engine.is_synchronous:
            self._thread = host.thread("move", engine.copy_aside)
        self._host = host
        self._starts: list[Future[_Start]] = []
        self._concluded: list[Future[_Start]] = []
        self._end: Future[MoveStats] | None = None

    def another(self) -> "CopyThread":
        """Return a second user of the same thread."""
        return CopyThread(self._engine, self._host, self._thread)

    def begin(self, copies: Round, finest: Split) -> threading.Event:
        """Start these copies after those before them.

        The event is set once the device has all of the work, or the start has failed.
        """
        launched = threading.Event()
        start = self._thread.submit(self._start, copies, finest, launched.set)
        start.add_done_callback(lambda _: launched.set())
        self._starts.append(start)
        return launched

    def _start(self, copies: Round, finest: Split, launched: Callable[[], None]) -> _Start:
        finish = self._engine.mover.start(copies, finest, launched)
        return finish, self._engine.mark()

    def check(self) -> None:
        """Raise known errors of copies that were to be started."""
        for start in self._starts:
            if start.done():
                start.result()

    def conclude(self, then: Callable[[], None]) -> None:
        """Close the migration to further copies; the thread calls `then` when all are done."""
        starts, self._starts = self._starts, []

        def end() -> MoveStats:
            stats = MoveStats(0, 0, 0.0)
            for start in starts:
                stats = stats.plus(start.result()[0]())
            then()
            return stats

        self._concluded = starts
        self._end = self._thread.submit(end)

    @property
    def is_over(self) -> bool:
        """Whether all copies are done, or there were none."""
        return self._end is None or self._end.done()

    @property
    def has_news(self) -> bool:
        """Whether `take` would return something."""
        return self._end is not None and self._end.done()

    def take(self) -> MoveStats:
        """Return the statistics of the finished copies; raises their error."""
        assert self._end is not None and not self._starts
        end, self._end = self._end, None
        return end.result()

    def go_before(self) -> None:
        """Queue the device's next work after the copies."""
        for start in self._concluded:
            start.result()[1]()
