"""The copies of a planned migration on one rank: in what order they run, and what they wait for.

Blocks that no in-flight step writes are copied at once, beside those steps; the rest, one block per
task, once every rank is quiesced. Everything waits if round 1 overwrites old KV or uses a process
group, and so do later rounds. If every copy stays within one wide group, the migration is reported
with its copies in flight, and commit and join overlap with them. Writes to those pages wait for all
members' copies. A rank that cannot finish its copies exits, which loses its group.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import structlog

from comm_pool.layout import Rank
from kvadaptor.geometry import Split
from kvadaptor.reshard.terms import UnitCopies
from kvadaptor.transfer.mailbox import GAVE_UP, RankMailbox
from kvadaptor.transfer.move_stats import MoveStats
from kvadaptor.transfer.rounds import by_source
from worker.io.host import HOST, Host
from worker.rank.engine import Continuation, Engine, Tokens
from worker.rank.migration.copy_thread import CopyThread
from worker.rank.migration.manifest import Bools, Ints, MigrationPlan, TaskSnapshot
from worker.rank.task_state import CachedChain

log = structlog.get_logger()

PEER_WAIT_LIMIT_S = 20.0
"""Maximum wait for a peer's manifest or copies before the migration is given up."""

PEER_POLL_S = 0.0001

COPIES_LIMIT_S = 1.0
"""Maximum wait for peers' copies after a commit.

Copies take a fraction of it; those of a lost peer do not count.
"""


class OvertakenError(Exception):
    """Another layout is wanted by now, so the migration stays undecided."""


class MoveFailedError(Exception):
    """The migration cannot be carried out; its tasks are recomputed."""


@dataclass(frozen=True, slots=True, eq=False)
class IncomingTask:
    """A task that this rank will lead: its snapshot, rebuilt request, blocks and tokens."""

    cargo: TaskSnapshot
    request: Continuation
    blocks: Ints
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class MigrationCallbacks:
    """What the main loop does during a migration."""

    restore: Callable[[], None]
    """Called once, while the first copies run."""
    go_on: Callable[[], None]
    """Called once after that, when all ranks are quiesced."""
    overtaken: Callable[[], bool]
    """Returns whether another layout is wanted by now."""


@dataclass(slots=True)
class PreparedMigration:
    """A migration copied on this rank whose commit is undecided."""

    epoch: int
    move: MigrationPlan
    incoming: list[IncomingTask] = field(default_factory=list)
    chains: list[CachedChain] = field(default_factory=list)
    rounds_done: int = 0
    ends_late: bool = False
    """Whether its copies may be in flight when it is reported."""

    @property
    def may_be_spoiled(self) -> bool:
        """Whether a rank may have overwritten old KV.

        No rank can begin a spoiling round before this rank has finished the round before it.
        """
        first = self.move.spoils_from
        return first is not None and self.rounds_done + 1 >= first


def split(
    copies: Iterable[UnitCopies], written: Mapping[int, Bools]
) -> tuple[list[UnitCopies], list[UnitCopies]]:
    """Separate copies of blocks that no in-flight step writes from those that must wait."""
    early: list[UnitCopies] = []
    late: list[UnitCopies] = []
    for each in copies:
        waits = np.zeros(each.src_units.size, dtype=np.bool_)
        if (own := written.get(each.dst_rank)) is not None:
            waits |= own[each.dst_units]
        for rank, units in written.items():
            mine = np.flatnonzero(each.src_ranks == rank)  # Others may have more units.
            waits[mine] |= units[each.src_units[mine]]
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
    """Runs the copies of one rank; used by its main loop alone."""

    def __init__(
        self,
        engine: Engine,
        mailboxes: Mapping[Rank, RankMailbox],
        rank: Rank,
        look: Callable[[], None],
        host: Host = HOST,
    ) -> None:
        """`look` is called in every wait: it collects results of this rank's last step."""
        self._engine = engine
        self._mailboxes = mailboxes
        self._rank = rank
        self._look = look
        self._host = host
        self._copies = CopyThread(engine, host)
        self._open: PreparedMigration | None = None
        """The last migration reported with copies in flight, until all ranks have finished them."""
        self._epoch = 0
        self._stats = MoveStats(0, 0, 0.0)
        self._copied: tuple[int, MoveStats] | None = None

    def another_thread(self) -> CopyThread:
        """Return a second user of this rank's copy thread."""
        return self._copies.another()

    def wait(
        self, condition: Callable[[], bool], overtaken: Callable[[], bool], complaint: str
    ) -> None:
        """Return when the condition holds.

        Raises `OvertakenError`, or `MoveFailedError` with the complaint after `PEER_WAIT_LIMIT_S`.
        """
        deadline_ns = self._after(PEER_WAIT_LIMIT_S)
        while not condition():
            self._look()
            if overtaken():
                raise OvertakenError
            if self._host.now_ns() > deadline_ns:
                raise MoveFailedError(f"{complaint} within {PEER_WAIT_LIMIT_S:.0f} s.")
            self._host.sleep(PEER_POLL_S)

    def _after(self, seconds: float) -> int:
        return self._host.now_ns() + int(seconds * 1e9)

    def carry_out(self, pending: PreparedMigration, meanwhile: MigrationCallbacks) -> None:
        """Copy this rank's share; raises as `wait` does."""
        self.take_copied()
        self._epoch, self._stats = pending.epoch, MoveStats(0, 0, 0.0)
        plan, own = pending.move.plan, self._mailboxes[self._rank]
        own.finish_round(1)  # Ready for round 1; i + 1 means that round i is finished.
        rounds = [
            [each for each in plan.copies if each.round == number]
            for number in range(1, plan.rounds + 1)
        ]
        if pending.move.may_begin_early and self._engine.mover.is_one_sided:
            self._copy_beside_steps(pending, rounds[0] if rounds else [], meanwhile)
        else:
            self._copy_after_steps(pending, rounds[0] if rounds else [], meanwhile)
        if pending.ends_late:
            pending.rounds_done = 1  # Its only round; the thread publishes the end.
            return
        for number, copies in enumerate(rounds, 1):
            if number > 1:
                self._await_round(pending, number, meanwhile.overtaken)
                with self._copying(copies, plan.finest):
                    pass
            pending.rounds_done = number
            own.finish_round(number + 1)
        self._copied = self._epoch, self._stats

    def _copy_beside_steps(
        self,
        pending: PreparedMigration,
        copies: Sequence[UnitCopies],
        meanwhile: MigrationCallbacks,
    ) -> None:
        """Run round 1 beside in-flight steps; blocks that these write are copied after them."""
        early, late = split(copies, pending.move.written)
        finest, own = pending.move.plan.finest, self._mailboxes[self._rank]
        self._begin(early, finest)
        try:
            meanwhile.restore()
            self._await_quiesced(pending, meanwhile.overtaken)
            if late:
                # They queue after the first ones.
                self._begin(late, finest, is_next=True)
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

    def _copy_after_steps(
        self,
        pending: PreparedMigration,
        copies: Sequence[UnitCopies],
        meanwhile: MigrationCallbacks,
    ) -> None:
        """Run round 1 after the old steps are over."""
        self._await_quiesced(pending, meanwhile.overtaken)
        if not pending.move.plan.rounds:
            meanwhile.restore()
            meanwhile.go_on()
            return
        # From now on the KV of this rank's tasks may be overwritten: see `may_be_spoiled`.
        self._await_round(pending, 1, meanwhile.overtaken)
        with self._copying(copies, pending.move.plan.finest):
            meanwhile.restore()
            meanwhile.go_on()

    @contextmanager
    def _copying(self, copies: Sequence[UnitCopies], finest: Split) -> Iterator[None]:
        """Copy while the block runs, then wait for the copies."""
        self._begin(copies, finest)
        try:
            yield
        finally:
            self._conclude()

    def _begin(self, copies: Sequence[UnitCopies], finest: Split, *, is_next: bool = False) -> None:
        """Start copies; `is_next`: others are running already."""
        self._give_up_pages(copies, finest.width)
        first = self._engine.spec.first
        by_rank = {
            each.dst_rank - first: by_source(each.src_ranks - first, each.src_units, each.dst_units)
            for each in copies
        }
        launched = self._copies.begin(by_rank, finest)
        if not is_next:
            # Building requests takes the CPU as long as copying takes the link, and would delay the
            # launch of the copies.
            launched.wait()

    def _give_up_pages(self, copies: Sequence[UnitCopies], units: int) -> None:
        """Let nobody continue a lost rank's tasks from pages that these copies change."""
        pages = [each.dst_units // units for each in copies if each.dst_rank == self._rank]
        directories = [mode.directory for mode in self._engine.modes.values()]
        for directory in directories if pages else ():
            if directory is not None:
                directory.give_up_pages(self._rank, np.concatenate(pages))

    def _conclude(self) -> None:
        """Wait for copies: none may still write after the migration has ended, however it ends."""
        self._copies.conclude(lambda: None)
        self.end()
        self._stats = self._stats.plus(self._copies.take())

    # ------------------------------------------------------------------ after a commit

    def take_copied(self) -> tuple[int, MoveStats] | None:
        """Return the last migration's epoch and copy statistics, once, when all copies are done.

        Raises the error of copies that were in flight when the migration was reported.
        """
        if self._copies.has_news:
            self._copied = self._epoch, self._copies.take()
        copied, self._copied = self._copied, None
        return copied

    def go_before(self) -> None:
        """Queue this rank's next device work after its copies."""
        if self._open is not None:
            self._open = None
            self._copies.go_before()

    def end(self) -> None:
        """Wait until this rank's copies are over; they may be in flight after a commit."""
        while not self._copies.is_over:
            self._look()
            self._host.sleep(PEER_POLL_S)

    def end_all(self) -> None:
        """Wait until no copy of the last migration reads or writes this rank's pages."""
        pending, self._open = self._open, None
        if pending is None:
            return
        self.end()
        deadline_ns = self._after(COPIES_LIMIT_S)
        mailboxes = [self._mailboxes[Rank(rank)] for rank in pending.move.ranks]
        while any(each.epoch == pending.epoch and each.round == 1 for each in mailboxes):
            if self._host.now_ns() > deadline_ns:
                log.warning("copies_not_waited_for", epoch=pending.epoch, seconds=COPIES_LIMIT_S)
                return
            self._host.sleep(PEER_POLL_S)

    def _await_quiesced(self, pending: PreparedMigration, overtaken: Callable[[], bool]) -> None:
        self._await_all(
            pending, lambda mailbox: mailbox.is_settled, overtaken, "has not ended its last step"
        )

    def _await_round(
        self, pending: PreparedMigration, number: int, overtaken: Callable[[], bool]
    ) -> None:
        self._await_all(
            pending,
            lambda mailbox: mailbox.round >= number,
            overtaken,
            f"has not finished round {number - 1}",
        )

    def _await_all(
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
                    raise MoveFailedError(f"rank {rank} gave up the migration.")
                return holds(mailbox)

            self.wait(is_there, overtaken, f"rank {rank} {complaint}")
