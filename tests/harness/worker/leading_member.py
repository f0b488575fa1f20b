"""A rank of a pair whose groups begin, over an engine in memory, and in which order it does so."""

from collections.abc import Callable
from typing import Any

import numpy as np

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.terms import Binding
from tests.harness.worker.fake_engine import FakeCell, FakeQueue
from tests.harness.worker.fake_rank import FakeRank

RANKS = (Rank(0), Rank(1))
WIDE = Binding(Group(RANKS, Mode.TP), 4)
ALONE = Binding(Group(RANKS[:1], Mode.DP), 5)


class Stage:
    """A rank, what it has done, and what it has sent to its followers."""

    def __init__(self, rank: int = 0) -> None:
        self.done: list[str] = []
        cell = FakeCell(2, pages=9)
        self.engine = cell.engines[Rank(rank)]
        self.runtime = FakeRank(cell, rank).runtime
        self.leader_queue = cell.engines[Rank(0)].of_width(2).queue
        self._follower_queue = cell.engines[Rank(1)].of_width(2).queue
        for mode in self.engine.modes.values():
            if mode.scheduler is not None:
                self.note(mode.scheduler, "grant")
        self.note(self.engine, "meet")
        self.note(self.runtime, "lead", "send")
        rounds = self.runtime.migration._rounds
        for name in ("go_before", "end_all"):
            self.note(rounds, name)

    def note(self, target: Any, name: str, word: str = "") -> None:
        """Add a word whenever a method is called."""
        method: Callable[..., Any] = getattr(target, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.done.append(word or name)
            return method(*args, **kwargs)

        setattr(target, name, noted)

    def sent(self) -> list[Any]:
        """Return, once, what the follower is sent."""
        return messages_of(self._follower_queue)

    def has_moved_to(self, binding: Binding, *, ends_late: bool) -> None:
        """A committed move has prepared this group."""
        self.runtime.migration._meets_in = binding.group.ranks if ends_late else ()
        self.runtime.leases.prepared(binding, np.zeros(0, dtype=np.int64))
        self.runtime.join(binding)


def messages_of(queue: FakeQueue) -> list[Any]:
    """Empty a queue."""
    found = []
    while True:
        try:
            found.append(queue.dequeue())
        except TimeoutError:
            return found
