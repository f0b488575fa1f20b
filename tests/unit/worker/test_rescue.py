"""What the survivors of a lost group keep of its pages, and for how long."""

import numpy as np
import pytest

from comm_pool.layout import Rank, lease_key
from comm_pool.mixed import Staged
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.switch_actions import Resolve
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Carry, Phase
from kvadaptor.geometry import Split
from kvadaptor.group_directory import DirectoryShape, GroupDirectory
from kvadaptor.reshard.terms import ReshardPlan
from tests.harness.coordinator.builders import directive, target
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_rank import FakeRank, binding_of
from worker.rank.leases import RESCUE_S
from worker.rank.migration.copy_rounds import PreparedMigration
from worker.rank.migration.manifest import MigrationPlan

RANKS = (Rank(0), Rank(1))
BORN = 4
PAGES = 16
LEASED = 12


class Clock:
    """A host whose time the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now_ns(self) -> int:
        return int(self.seconds * 1e9)


class Survivor:
    """Rank 1, a follower of tp2, or the first stage of pp2, of which rank 0 may be lost."""

    def __init__(self, stages: int = 1) -> None:
        rank = FakeRank(FakeCell(2, pages=PAGES, pipelines=[Staged(2)]), 1)
        self.key = lease_key(RANKS, stages)
        self.runtime, self.engine, self.clock = rank.runtime, rank.engine, Clock()
        self.runtime.host = self.clock  # type: ignore[assignment]
        shape = DirectoryShape(self.key, PAGES, 2, stages)
        memory = memoryview(bytearray(shape.num_bytes))
        self.leader, self.own, self.reader = (GroupDirectory(memory, shape) for _ in range(3))
        self.engine.directories[self.key] = self.own
        self.participant = SwitchParticipant(Rank(1), 1)
        self.hear(BORN)
        binding = binding_of(0, 2, BORN, stages)
        self.runtime.leases.formed(self.key, self.order(BORN))
        self.runtime.leases.joined(binding)
        mode = self.engine.of_width(2, stages)
        assert mode.table is not None
        self.leader.begin(BORN, (1, 1))
        self.runtime.leases.begin(mode, binding, LEASED, ())
        self.leader.keep(0, BORN, mode.table.all_slots())
        self.keys = iter(bytes([number]) * 32 for number in range(100))

    def order(self, epoch: int, rank_0: int = 1) -> Directive:
        wanted = target("dp4", epoch)
        return directive(wanted, epoch, Phase.PARK, carry=Carry.RESHARD, members={0: rank_0})

    def hear(self, epoch: int, rank_0: int = 1) -> None:
        order = self.order(epoch, rank_0)
        self.participant.on_directive(order)
        self.runtime.leases.hear(order, self.participant)

    def fill(self, *indices: int) -> None:
        for index in indices:
            self.leader.fill([2 * index], [next(self.keys)])

    @property
    def leased(self) -> list[int]:
        found: list[int] = self.engine.pages.lease_indices(self.key).tolist()
        return found

    @property
    def readable(self) -> list[int]:
        return self.reader.entries()[0] if self.reader.formation else []


@pytest.mark.parametrize("stages", [1, 2])
def test_pages_with_tasks_stay_until_others_had_time_to_read_them(stages: int) -> None:
    rank = Survivor(stages)
    rank.fill(2, 3, 5)
    rank.leader.release([10])
    rank.hear(BORN + 1, rank_0=2)
    assert rank.leased == [2, 3]
    assert rank.readable == [4, 6], "what no task holds is not kept"
    assert rank.engine.present[Rank(0)] == 2
    rank.clock.seconds += RESCUE_S - 0.1
    rank.runtime.look()
    assert rank.leased == [2, 3]
    rank.clock.seconds += 0.2
    rank.runtime.look()
    assert rank.leased == []
    assert rank.readable == []


def test_others_have_room_for_what_is_kept() -> None:
    rank = Survivor()
    rank.fill(*range(1, LEASED + 1))
    rank.hear(BORN + 1, rank_0=2)
    assert rank.leased == list(range(1, PAGES // 3 + 1))
    # Two blocks a page, of which rank 0 has the other half: as many pages as are free here.
    assert 2 * len(rank.leased) <= rank.engine.pages.counts().free


def test_pages_that_a_migration_took_from_the_lease_are_not_read() -> None:
    """The directory still shows them as they were when the group of a formation before began."""
    rank = Survivor()
    rank.fill(2, 3)
    rank.engine.pages.keep_only(RANKS, (1, 2))
    rank.hear(BORN + 1, rank_0=2)
    alone = binding_of(1, 1, BORN + 2)
    rank.runtime.leases.begin(rank.engine.of_width(1), alone, PAGES - 2, ())
    assert rank.leased == [2]
    assert rank.readable == [4], "block 6 was in a page that the next group writes to"


def test_a_migration_may_have_spread_a_block_over_the_pages_of_another_index() -> None:
    """Members then keep the pages in which they have the blocks, not those of the same index."""
    rank = Survivor()
    table = rank.engine.of_width(2).table
    assert table is not None
    # Blocks 4 to 7 lie in slots 7, 6, 5 and 4 of pages 2 and 3.
    table.assign(np.array([4, 5, 6, 7]), np.array([7, 6, 5, 4]))
    rank.own.keep(1, BORN, table.all_slots())
    rank.fill(2)
    rank.hear(BORN + 1, rank_0=2)
    assert rank.leased == [3], "block 4 is in slot 7"
    assert rank.readable == [4]
    rank.clock.seconds += RESCUE_S + 0.1
    rank.runtime.look()
    assert rank.readable == []


def test_a_block_is_read_whose_neighbour_was_in_a_page_that_is_freed() -> None:
    """A migration put the two blocks of a lease index into two pages; a task holds one of them."""
    rank = Survivor()
    table = rank.engine.of_width(2).table
    assert table is not None
    table.assign(np.array([4, 5, 6, 7]), np.array([4, 6, 5, 7]))
    rank.own.keep(1, BORN, table.all_slots())
    rank.leader.fill([4, 5], [next(rank.keys), next(rank.keys)])
    rank.leader.release([5])
    rank.hear(BORN + 1, rank_0=2)
    assert rank.leased == [2], "block 4 is in slot 4"
    assert rank.readable == [4], "block 5 was in page 3, which may change"


def test_a_group_that_is_left_whole_keeps_nothing() -> None:
    rank = Survivor()
    rank.fill(2, 3)
    assert rank.runtime.leases.keep_only(RANKS, (3,))
    assert rank.leased == [3]
    assert rank.readable == [6]


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_group_that_begins_ends_the_rescue_of_its_ranks_alone(is_new: bool, stages: int) -> None:
    rank = Survivor(stages)
    rank.fill(2, 3)
    rank.hear(BORN + 1, rank_0=2)
    own = binding_of(0, 2, BORN + 2, stages) if is_new else binding_of(1, 1, BORN + 2)
    rank.runtime.leases.formed(own.group.lease_key, rank.order(BORN + 2, 2))
    rank.runtime.leases.joined(own)
    mode = rank.engine.of_width(own.group.width, own.group.stages)
    rank.runtime.leases.begin(mode, own, 3, ())
    assert rank.leased == ([1, 2, 3] if is_new else [2, 3])
    assert rank.readable == ([] if is_new else [4, 6])
    rank.clock.seconds += RESCUE_S + 0.1
    rank.runtime.look()
    assert rank.leased == ([1, 2, 3] if is_new else [])


def test_a_group_that_begins_lets_nobody_read_what_its_pages_held() -> None:
    rank = Survivor()
    rank.fill(2)
    own = binding_of(1, 1, BORN + 2)
    rank.runtime.leases.begin(rank.engine.of_width(1), own, 3, ())
    assert rank.readable == []


def test_a_group_of_the_same_ranks_that_divides_kv_otherwise_leaves_the_rescue_alone() -> None:
    """tp2 gets the pages that are free; what pp2 has left stays in the others."""
    rank = Survivor(stages=2)
    rank.fill(2, 3)
    rank.hear(BORN + 1, rank_0=2)
    other = binding_of(0, 2, BORN + 2)
    rank.runtime.leases.formed(RANKS, rank.order(BORN + 2, 2))
    rank.runtime.leases.joined(other)
    rank.runtime.leases.begin(rank.engine.of_width(2), other, 3, ())
    assert rank.leased == [2, 3]
    assert rank.readable == [4, 6]


def test_an_aborted_formation_is_lost_before_the_coordinator_says_so() -> None:
    rank = Survivor()
    rank.fill(2)
    rank.engine.communicators.abort(RANKS, BORN)
    rank.runtime.leases.keep_only(RANKS, ())
    assert rank.leased == [2]


def test_a_migration_from_the_next_formation_ends_the_rescue() -> None:
    """That formation may never have begun, and the pages are the next group's."""
    rank = Survivor()
    rank.fill(2, 3)
    rank.hear(BORN + 1, rank_0=2)
    again, alone = binding_of(0, 2, BORN + 2), binding_of(1, 1, BORN + 3)
    rank.runtime.leases.joined(again)
    rank.runtime.migration.on_leave(again)
    plan = ReshardPlan(Split(1, 2), 0, (), (), (), (), (), 0)
    move = MigrationPlan(RANKS, (), plan, (), {}, {}, (RANKS,), None, {})
    rank.runtime.migration._pending = PreparedMigration(BORN + 3, move)
    order = rank.order(BORN + 3, 2)
    rank.runtime.migration.resolve(Resolve(BORN + 3, True, False, False, order))
    rank.runtime.leases.begin(rank.engine.of_width(1), alone, 3, ())
    assert rank.leased == []
    assert rank.readable == []
