"""A member on rank 0 that leads, and notes in which order it does things."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.terms import Binding
from kvadaptor.pages import PagePool
from worker.rank.runtime import GroupRuntime

RANKS = (Rank(0), Rank(1))
WIDE = Binding(Group(RANKS, Mode.TP), 4)
ALONE = Binding(Group(RANKS[:1], Mode.DP), 5)


class Stage:
    """Rank 0, which leads, and in which order it does things."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.sent: list[Any] = []
        queue = SimpleNamespace(enqueue=lambda message, timeout: self.send(message))
        self.modes = {width: self.mode(width, queue) for width in (1, 2)}
        engine = SimpleNamespace(
            pages=PagePool(9),
            modes=self.modes,
            mailboxes={},
            spec=SimpleNamespace(rank=RANKS[0]),
            copy_aside=None,
            is_synchronous=False,
            communicators=SimpleNamespace(is_aborted=lambda *_: False),
            select=lambda width, formation: self.modes[width],
            of_width=lambda width: self.modes[width],
            meet=lambda _: self.done.append("meet"),
        )
        self.runtime = GroupRuntime(cast(Any, engine), 1, cast(Any, None))
        rounds = self.runtime.migration._rounds
        for name in ("go_before", "end_all"):
            setattr(rounds, name, lambda name=name: self.done.append(name))

    def mode(self, width: int, queue: Any) -> Any:
        scheduler = SimpleNamespace(
            grant=lambda _: self.done.append("grant"),
            idle=True,
            requests={},
            holders_of=lambda _: (),
        )
        table = SimpleNamespace(map=lambda *_: None, unmap=lambda _: None) if width > 1 else None
        return SimpleNamespace(
            width=width, ranks=RANKS[:width], queue=queue, table=table, scheduler=scheduler
        )

    def send(self, message: Any) -> None:
        self.done.append("send")
        self.sent.append(message)

    def has_moved_to(self, binding: Binding, *, ends_late: bool) -> None:
        """A committed move has prepared this group."""
        self.runtime.migration._meets_in = binding.group.ranks if ends_late else ()
        self.runtime.prepared(binding, np.zeros(0, dtype=np.int64))
        self.runtime.join(binding)
