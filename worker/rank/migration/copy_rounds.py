"""The copies of a planned move on one rank: what is copied when, and what is waited for.

Steps that were under way when their groups were left go on meanwhile. What they do not write is
copied at once, beside them; the rest, a block per task, when every rank has settled. Rounds behind
the first, and a first one that writes where old KV lies or is sent through a process group, wait.

Where each copy stays within a wide group, the move is reported with its copies under way: it is
committed, and the group joined, beside them. What writes to pages waits for all members' copies. A
rank that cannot finish its own ends, and its group is lost with it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from comm_pool.layout import Rank
from comm_pool.mailbox import GAVE_UP, RankMailbox
from kvadaptor.reshard.terms import UnitCopies
from kvadaptor.transfer.movers import MoveStats, PeerMover, by_source
from worker.engine.rank_engine import RankEngine
from worker.engine.scheduling.handover import CachedChain
from worker.rank.migration.copy_thread import CopyThread
from worker.rank.migration.manifest import Bools, Ints, MigrationPlan, TaskSnapshot

log = structlog.get_logger()

PEER_WAIT_LIMIT_S = 20.0
"""How long a rank waits for what a peer has to tell or copy before the move is given up."""

PEER_POLL_S = 0.0001

COPIES_LIMIT_S = 1.0
"""How long a rank waits for the copies of others behind a commit: many times what copies take, and
one that is lost has none that count."""


class OvertakenError(Exception):
    """Another layout is wanted by now: the move is left as it is."""


class MoveFailedError(Exception):
    """The move cannot be carried out; its tasks are computed again."""


@dataclass(frozen=True, slots=True, eq=False)
class RestoredTask:
    """A task that this rank will lead: what was told of it, the request, its blocks, its tokens."""

    cargo: TaskSnapshot
    request: Any
    blocks: Ints
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MigrationCallbacks:
    """What the main loop does during a move."""

    restore: Callable[[], None]
    """Called once, while the first copies are made."""
    go_on: Callable[[], None]
    """Called then, when all ranks have settled."""
    overtaken: Callable[[], bool]
    """Whether another layout is wanted by now."""


@dataclass(slots=True)
class PreparedMigration:
    """A move whose copies are made here, until it is known whether it counts."""

    epoch: int
    move: MigrationPlan
    restored: list[RestoredTask] = field(default_factory=list)
    chains: list[CachedChain] = field(default_factory=list)
    rounds_done: int = 0
    ends_late: bool = False
    """Its copies may be under way."""

    @property
    def may_be_spoiled(self) -> bool:
        """Whether a rank may have overwritten what lay there before the move.

        Nobody could begin a round that does before this rank had finished the one before it.
        """
        first = self.move.spoils_from
        return first is not None and self.rounds_done + 1 >= first


def split(
    copies: Iterable[UnitCopies], written: Mapping[int, Bools]
) -> tuple[list[UnitCopies], list[UnitCopies]]:
    """Tell copies that old steps do not touch from those that wait for them."""
    early: list[UnitCopies] = []
    late: list[UnitCopies] = []
    for each in copies:
        waits = np.zeros(each.src_units.size, dtype=np.bool_)
        if (own := written.get(each.dst_rank)) is not None:
            waits |= own[each.dst_units]
        for rank, units in written.items():
            waits |= (each.src_ranks == rank) & units[each.src_units]
        for part, mask in ((early, ~waits), (late, waits)):
            if mask.any():
                part.append(_of(each, mask))
    return early, late


def _of(copies: UnitCopies, mask: Bools) -> UnitCopies:
    return replace(
        copies,
        src_ranks=copies.src_ranks[mask],
        src_units=copies.src_units[mask],
        dst_units=copies.dst_units[mask],
    )


class CopyRounds:
    """Carries out the copies of one rank; used by its main loop alone."""

    def __init__(
        self,
        engine: RankEngine,
        mailboxes: Mapping[Rank, RankMailbox],
        rank: Rank,
        look: Callable[[], None],
    ) -> None:
        """`look` is called all the while: it takes what this rank's last step has brought."""
        self._engine = engine
        self._mailboxes = mailboxes
        self._rank = rank
        self._look = look
        self._copies = CopyThread(engine)
        self._open: PreparedMigration | None = None
        """The last move that was reported with copies under way, until nothing can meet them."""
        self._epoch = 0
        self._stats = MoveStats(0, 0, 0.0)
        self._copied: tuple[int, MoveStats] | None = None

    def wait(
        self, condition: Callable[[], bool], overtaken: Callable[[], bool], complaint: str
    ) -> None:
        """Return when the condition holds.

        Raises `OvertakenError`, or `MoveFailedError` with the complaint when it takes too long.
        """
        deadline = time.monotonic() + PEER_WAIT_LIMIT_S
        while not condition():
            self._look()
            if overtaken():
                raise OvertakenError
            if time.monotonic() > deadline:
                raise MoveFailedError(f"{complaint} for {PEER_WAIT_LIMIT_S:.0f} s.")
            time.sleep(PEER_POLL_S)

    def carry_out(self, pending: PreparedMigration, meanwhile: MigrationCallbacks) -> None:
        """Copy this rank's share; raises as `wait` does."""
        self.take_copied()
        self._epoch, self._stats = pending.epoch, MoveStats(0, 0, 0.0)
        plan, own = pending.move.plan, self._mailboxes[self._rank]
        own.finish_round(1)  # Ready for round 1; round i is finished with i + 1.
        rounds = [
            [each for each in plan.copies if each.round == number]
            for number in range(1, plan.rounds + 1)
        ]
        if pending.move.may_begin_early and isinstance(self._engine.mover, PeerMover):
            self._beside_steps(pending, rounds[0] if rounds else [], meanwhile)
        else:
            self._behind_steps(pending, rounds[0] if rounds else [], meanwhile)
        if pending.ends_late:
            pending.rounds_done = 1  # Its only one, whose end is told when it comes.
            return
        for number, copies in enumerate(rounds, 1):
            if number > 1:
                self._meet(pending, number, meanwhile.overtaken)
                with self._copying(copies, plan.units):
                    pass
            pending.rounds_done = number
            own.finish_round(number + 1)
        self._copied = self._epoch, self._stats

    def _beside_steps(
        self,
        pending: PreparedMigration,
        copies: Sequence[UnitCopies],
        meanwhile: MigrationCallbacks,
    ) -> None:
        """Make the copies of round 1 while old steps are under way, where these write nothing."""
        early, late = split(copies, pending.move.written)
        units, own = pending.move.plan.units, self._mailboxes[self._rank]
        self._begin(early, units)
        try:
            meanwhile.restore()
            self._meet_settled(pending, meanwhile.overtaken)
            if late:
                # They follow the first ones by themselves.
                self._begin(late, units, is_next=True)
            meanwhile.go_on()
            self._copies.check()
        except BaseException:
            self._conclude()
            raise
        pending.ends_late = pending.move.may_end_late
        if pending.ends_late:
            self._open = pending
            self._copies.conclude(lambda: own.finish_round(2))
        else:
            self._conclude()

    def _behind_steps(
        self,
        pending: PreparedMigration,
        copies: Sequence[UnitCopies],
        meanwhile: MigrationCallbacks,
    ) -> None:
        """Make the copies of round 1 when old steps are over."""
        self._meet_settled(pending, meanwhile.overtaken)
        if not pending.move.plan.rounds:
            meanwhile.restore()
            meanwhile.go_on()
            return
        # What this rank leads may be lost from now on, and it knows.
        self._meet(pending, 1, meanwhile.overtaken)
        with self._copying(copies, pending.move.plan.units):
            meanwhile.restore()
            meanwhile.go_on()

    @contextmanager
    def _copying(self, copies: Sequence[UnitCopies], units: int) -> Iterator[None]:
        """Copy beside the block, and wait for it behind."""
        self._begin(copies, units)
        try:
            yield
        finally:
            self._conclude()

    def _begin(self, copies: Sequence[UnitCopies], units: int, *, is_next: bool = False) -> None:
        """Start copies; `is_next`: others are being made."""
        first = self._engine.spec.first
        by_rank = {
            each.dst_rank - first: by_source(each.src_ranks - first, each.src_units, each.dst_units)
            for each in copies
        }
        launched = self._copies.begin(by_rank, units)
        if not is_next:
            # Building requests takes the CPU as long as copying takes the link, and would take it
            # from what has to be done before the link is at work.
            launched.wait()

    def _conclude(self) -> None:
        """Wait for copies: whatever becomes of the move, none may write behind its back."""
        self._copies.conclude(lambda: None)
        self.end()
        self._stats = self._stats.plus(self._copies.take())

    # ------------------------------------------------------------------ behind a commit

    def take_copied(self) -> tuple[int, MoveStats] | None:
        """Return the epoch of the last move and what it has brought here, once, when all is there.

        Raises what went wrong with copies that were under way when it was reported.
        """
        if self._copies.has_news:
            self._copied = self._epoch, self._copies.take()
        copied, self._copied = self._copied, None
        return copied

    def go_before(self) -> None:
        """What this rank's device is told next comes behind its copies."""
        if self._open is not None:
            self._open = None
            self._copies.go_before()

    def end(self) -> None:
        """Wait until this rank's copies are over, which may be under way behind a commit."""
        while not self._copies.is_over:
            self._look()
            time.sleep(PEER_POLL_S)

    def end_all(self) -> None:
        """Wait until no copy of the last move reads or writes this rank's pages any more."""
        pending, self._open = self._open, None
        if pending is None:
            return
        self.end()
        deadline = time.monotonic() + COPIES_LIMIT_S
        mailboxes = [self._mailboxes[Rank(rank)] for rank in pending.move.ranks]
        while any(each.epoch == pending.epoch and each.round == 1 for each in mailboxes):
            if time.monotonic() > deadline:
                log.warning("copies_not_waited_for", epoch=pending.epoch, seconds=COPIES_LIMIT_S)
                return
            time.sleep(PEER_POLL_S)

    def _meet_settled(self, pending: PreparedMigration, overtaken: Callable[[], bool]) -> None:
        self._meet_all(
            pending, lambda mailbox: mailbox.is_settled, overtaken, "does not end its last step"
        )

    def _meet(self, pending: PreparedMigration, number: int, overtaken: Callable[[], bool]) -> None:
        self._meet_all(
            pending,
            lambda mailbox: mailbox.round >= number,
            overtaken,
            f"does not finish round {number - 1}",
        )

    def _meet_all(
        self,
        pending: PreparedMigration,
        holds: Callable[[RankMailbox], bool],
        overtaken: Callable[[], bool],
        complaint: str,
    ) -> None:
        for rank in pending.move.ranks:

            def is_there(rank: int = rank) -> bool:
                mailbox = self._mailboxes[Rank(rank)]
                if mailbox.epoch != pending.epoch or mailbox.round == GAVE_UP:
                    raise MoveFailedError(f"rank {rank} gave the move up.")
                return holds(mailbox)

            self.wait(is_there, overtaken, f"rank {rank} {complaint}")
