"""What a rank copies while old steps are under way, and what it waits for."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.terms import Binding
from kvadaptor.geometry import Split
from kvadaptor.reshard.terms import ReshardPlan, UnitCopies
from kvadaptor.transfer.mailbox import GAVE_UP, RankMailbox
from kvadaptor.transfer.move_stats import MoveStats
from kvadaptor.transfer.rounds import Finish, MoveError
from tests.harness.worker.fake_engine import FakeCell
from worker.rank.migration.copy_rounds import (
    CopyRounds,
    MigrationCallbacks,
    MoveFailedError,
    OvertakenError,
    PreparedMigration,
    split,
)
from worker.rank.migration.manifest import MigrationPlan

UNITS = 20
EPOCH = 5


def copies(dst: int, sources: list[tuple[int, int, int]], number: int = 1) -> UnitCopies:
    """(source rank, source unit, destination unit) of each."""
    ranks, units, targets = (np.array(each, dtype=np.int64) for each in zip(*sources, strict=True))
    return UnitCopies(number, dst, ranks, units, targets)


def written(*units: int) -> Any:
    mask = np.zeros(UNITS, dtype=np.bool_)
    mask[list(units)] = True
    return mask


def pairs(parts: list[UnitCopies]) -> list[tuple[int, int, int, int]]:
    return [
        (each.dst_rank, *row)
        for each in parts
        for row in zip(
            each.src_ranks.tolist(), each.src_units.tolist(), each.dst_units.tolist(), strict=True
        )
    ]


def test_only_what_steps_under_way_write_is_copied_later() -> None:
    all_of = [copies(0, [(0, 3, 4), (1, 5, 6), (1, 7, 8)]), copies(1, [(0, 5, 9)])]
    early, late = split(all_of, {1: written(7)})
    assert pairs(early) == [(0, 0, 3, 4), (0, 1, 5, 6), (1, 0, 5, 9)]
    assert pairs(late) == [(0, 1, 7, 8)]


def test_nothing_is_copied_early_to_where_a_step_under_way_writes() -> None:
    early, late = split([copies(0, [(1, 3, 4), (1, 5, 6)])], {0: written(6)})
    assert (pairs(early), pairs(late)) == ([(0, 1, 3, 4)], [(0, 1, 5, 6)])


def test_a_rank_with_more_pages_is_read_beside_one_that_still_writes() -> None:
    units = written(7).size
    early, late = split([copies(0, [(0, units + 5, 4), (1, 7, 6)])], {1: written(7)})
    assert (pairs(early), pairs(late)) == ([(0, 0, units + 5, 4)], [(0, 1, 7, 6)])


def test_without_a_step_under_way_all_is_copied_at_once() -> None:
    all_of = [copies(0, [(1, 3, 4)])]
    early, late = split(all_of, {})
    assert (pairs(early), late) == ([(0, 1, 3, 4)], [])


class Recorder:
    """Notes what it is asked to copy, and whether the peers had settled by then."""

    is_one_sided = True

    def __init__(self, mailboxes: Mapping[Rank, RankMailbox]) -> None:
        self.mailboxes = mailboxes
        self.takes_s = 0.0
        self.is_device = False
        """Copies are launched at once, and waited for at the end."""
        self.fails = self.refuses = False
        self.calls: list[tuple[list[int], bool]] = []
        self.done = threading.Event()
        self.under_way = 0

    def start(self, copies: Any, finest: Split, launched: Any = lambda: None) -> Finish:
        assert finest == Split(1, 2)
        if self.refuses:
            raise MoveError("there is no such unit")
        launched()
        targets = [int(each) for pair in copies.get(0, {}).values() for each in pair[1]]
        self.calls.append((targets, all(mailbox.is_settled for mailbox in self.mailboxes.values())))
        self.under_way += 1
        if not self.is_device:
            self.end()

        def finish() -> MoveStats:
            if self.is_device:
                self.end()
            return MoveStats(len(targets), 0, 0.5)

        return finish

    def end(self) -> None:
        time.sleep(self.takes_s)
        if self.fails:
            raise RuntimeError("the device is gone")
        self.under_way -= 1
        self.done.set()


class Stage:
    """Rank 0 of two, whose copies are these."""

    def __init__(
        self,
        parts: list[UnitCopies],
        *,
        early: bool = True,
        rounds: int = 1,
        late: bool = False,
    ) -> None:
        engine = FakeCell(2).engines[Rank(0)]
        self.mailboxes = engine.mailboxes
        for mailbox in self.mailboxes.values():
            mailbox.publish(EPOCH, b"manifest")
        self.mover = Recorder(self.mailboxes)
        self.looks = 0
        self.settles_after = 3
        self.meets = False
        """The peers finish round 1."""
        pair = (Rank(0), Rank(1))
        alone = tuple(Binding(Group((rank,), Mode.DP), EPOCH) for rank in pair)
        move = MigrationPlan(
            ranks=pair,
            bindings=(Binding(Group(pair, Mode.TP), EPOCH),) if late else alone,
            plan=ReshardPlan(Split(1, 2), rounds, (), (), tuple(parts), (), (), 0),
            indices=(),
            cargo={},
            chains={},
            old_groups=(),
            spoils_from=None if early else 1,
            written={1: written(7)},
        )
        assert (move.may_begin_early, move.may_end_late) == (early, late)
        self.pending = PreparedMigration(EPOCH, move)
        self.restored = 0
        self.told: list[int] = []
        """How many copies were over when it went on."""
        self.marks: list[int] = []
        """How many copies the device was told of before what comes behind them."""
        engine.is_synchronous, engine.mover = False, self.mover
        marking: Any = engine
        marking.mark = self.mark
        self.rounds = CopyRounds(engine, self.mailboxes, Rank(0), self.look)

    def mark(self) -> Callable[[], None]:
        count = len(self.mover.calls)
        return lambda: self.marks.append(count)

    def look(self) -> None:
        self.looks += 1
        if self.looks >= self.settles_after:
            for mailbox in self.mailboxes.values():
                mailbox.settle(b"tokens")
                if mailbox.round != GAVE_UP:
                    mailbox.finish_round(max(mailbox.round, 2 if self.meets else 1))

    def restore(self) -> None:
        assert not self.told
        self.restored += 1

    def go_on(self) -> None:
        """What the last steps brought is there, and requests to add it to."""
        assert self.restored == 1
        assert all(mailbox.is_settled for mailbox in self.mailboxes.values())
        self.told.append(len(self.mover.calls) - self.mover.under_way)

    def run(self, *, is_overtaken: bool = False) -> None:
        meanwhile = MigrationCallbacks(self.restore, self.go_on, lambda: is_overtaken)
        self.rounds.carry_out(self.pending, meanwhile)


PARTS = [copies(0, [(1, 3, 4), (1, 7, 8)])]


def test_settled_units_are_copied_first_and_the_others_behind_the_last_step() -> None:
    stage = Stage(PARTS)
    stage.run()
    assert stage.mover.calls == [([4], False), ([8], True)]
    assert (stage.restored, stage.mailboxes[Rank(0)].round, stage.pending.rounds_done) == (1, 2, 1)
    assert stage.rounds.take_copied() == (5, MoveStats(2, 0, 1.0)), "both count"
    assert stage.rounds.take_copied() is None


def test_only_the_first_round_begins_before_old_steps_are_over() -> None:
    stage = Stage([*PARTS, copies(0, [(1, 9, 10)], number=2)], rounds=2)
    stage.meets = True
    stage.run()
    assert stage.mover.calls == [([4], False), ([8], True), ([10], True)]
    assert (stage.restored, stage.mailboxes[Rank(0)].round, stage.pending.rounds_done) == (1, 3, 2)


def test_a_move_that_may_not_begin_early_waits_first() -> None:
    stage = Stage(PARTS, early=False)
    stage.run()
    assert stage.mover.calls == [([4, 8], True)]
    assert (stage.restored, stage.mailboxes[Rank(0)].round) == (1, 2)


def test_a_move_without_copies_waits_for_the_last_tokens() -> None:
    stage = Stage([], rounds=0)
    stage.run()
    assert stage.restored == 1
    assert all(mailbox.is_settled for mailbox in stage.mailboxes.values())


def test_copies_that_were_begun_are_over_before_another_layout_is_obeyed() -> None:
    stage = Stage(PARTS)
    stage.settles_after = 10**9
    stage.mover.takes_s = 0.2
    with pytest.raises(OvertakenError):
        stage.run(is_overtaken=True)
    assert stage.mover.done.is_set()
    assert [targets for targets, _ in stage.mover.calls] == [[4]]
    assert not stage.told


def test_tokens_are_added_while_copies_are_made() -> None:
    stage = Stage(PARTS)
    stage.mover.takes_s = 0.3
    stage.settles_after = 0
    stage.look()
    stage.run()
    assert stage.mover.calls == [([4], True), ([8], True)]
    assert stage.told == [0], "not one copy was over"
    assert stage.mailboxes[Rank(0)].round == 2


def test_late_copies_are_over_before_a_move_that_fails_is_given_up() -> None:
    stage = Stage(PARTS)
    stage.mover.takes_s = 0.1

    def fail() -> None:
        raise MoveFailedError("a token is missing")

    with pytest.raises(MoveFailedError, match="a token is missing"):
        stage.rounds.carry_out(
            stage.pending, MigrationCallbacks(stage.restore, fail, lambda: False)
        )
    assert [targets for targets, _ in stage.mover.calls] == [[4], [8]]
    assert stage.mover.under_way == 0


def test_a_peer_that_gives_up_ends_the_move() -> None:
    stage = Stage(PARTS)
    stage.settles_after = 10**9
    stage.mailboxes[Rank(0)].settle(b"tokens")
    stage.mailboxes[Rank(1)].finish_round(GAVE_UP)
    with pytest.raises(MoveFailedError, match="rank 1 gave up the migration"):
        stage.run()
    assert len(stage.mover.calls) == 1, "what waits for old steps was not copied"


@pytest.mark.parametrize("is_device", [True, False])
def test_a_move_may_be_reported_with_its_copies_under_way(is_device: bool) -> None:
    stage = Stage(PARTS, late=True)
    stage.mover.takes_s, stage.mover.is_device = 0.2, is_device
    stage.settles_after = 0
    stage.look()
    stage.run()
    assert stage.pending.ends_late
    assert stage.mover.under_way >= 1, "it has not waited"
    assert stage.mailboxes[Rank(0)].round == 1
    assert stage.rounds.take_copied() is None
    stage.rounds.end()
    assert stage.mover.under_way == 0
    assert stage.mailboxes[Rank(0)].round == 2
    assert stage.rounds.take_copied() == (5, MoveStats(2, 0, 1.0))
    assert stage.rounds.take_copied() is None


def test_the_device_goes_on_behind_all_copies() -> None:
    stage = Stage(PARTS, late=True)
    stage.mover.takes_s, stage.mover.is_device = 0.2, True
    stage.run()
    stage.rounds.go_before()
    assert stage.marks == [1, 2]
    assert stage.mover.under_way == 2, "the host has not waited"
    stage.rounds.go_before()
    assert stage.marks == [1, 2], "once is enough"


def test_pages_are_used_again_when_all_ranks_have_copied() -> None:
    stage = Stage(PARTS, late=True)
    stage.run()
    other = stage.mailboxes[Rank(1)]
    assert other.round == 1

    def finish() -> None:
        time.sleep(0.1)
        other.finish_round(2)

    thread = threading.Thread(target=finish)
    thread.start()
    stage.rounds.end_all()
    assert other.round == 2
    thread.join()


@pytest.mark.parametrize("why", ["gave up", "is in another move", "is lost"])
def test_who_does_not_copy_any_more_is_not_waited_for(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "worker.rank.migration.copy_rounds.COPIES_LIMIT_S", 0.2 if why == "is lost" else 60.0
    )
    stage = Stage(PARTS, late=True)
    stage.run()
    other = stage.mailboxes[Rank(1)]
    if why == "gave up":
        other.finish_round(GAVE_UP)
    elif why == "is in another move":
        other.publish(EPOCH + 1, b"manifest")
    started = time.monotonic()
    stage.rounds.end_all()
    waited_s = time.monotonic() - started
    assert waited_s >= 0.2 if why == "is lost" else waited_s < 30
    started = time.monotonic()
    stage.rounds.end_all()
    assert time.monotonic() - started < 0.1, "it is over"


def test_copies_that_fail_behind_the_report_end_the_rank() -> None:
    stage = Stage(PARTS, late=True)
    stage.mover.is_device = stage.mover.fails = True
    stage.run()
    stage.rounds.end()
    assert stage.mailboxes[Rank(0)].round == 1, "nobody is told that it has copied"
    with pytest.raises(RuntimeError, match="the device is gone"):
        stage.rounds.take_copied()


def test_copies_that_cannot_be_started_are_no_move() -> None:
    stage = Stage(PARTS, late=True)
    stage.mover.is_device = stage.mover.refuses = True
    with pytest.raises(MoveError, match="there is no such unit"):
        stage.run()
    assert not stage.pending.ends_late


def test_a_move_that_fails_is_given_up_behind_its_copies_even_if_it_may_end_late() -> None:
    stage = Stage(PARTS, late=True)
    stage.mover.takes_s, stage.mover.is_device = 0.1, True

    def fail() -> None:
        raise MoveFailedError("a token is missing")

    with pytest.raises(MoveFailedError, match="a token is missing"):
        stage.rounds.carry_out(
            stage.pending, MigrationCallbacks(stage.restore, fail, lambda: False)
        )
    assert stage.mover.under_way == 0
    assert not stage.pending.ends_late
