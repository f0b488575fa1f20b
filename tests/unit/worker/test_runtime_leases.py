"""What a rank keeps of the lease of a group that it has left."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.rank import Directive, LeaseRetention
from coordinator.protocol.switch_actions import Leave, Move, Resolve
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Binding, Carry, Phase
from tests.harness.coordinator.builders import directive, target
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_rank import FakeRank
from worker.rank.migration.copy_rounds import PreparedMigration
from worker.rank.runtime import GroupRuntime

RANKS = (Rank(0), Rank(1))
GROUP = Group(RANKS, Mode.TP)
BORN = 4


@pytest.fixture
def runtime() -> GroupRuntime:
    """A follower that has leased all its pages to a group."""
    rank = FakeRank(FakeCell(2, pages=9), 1)
    table = rank.engine.of_width(2).table
    assert table is not None
    table.map(*rank.engine.pages.lease_pages(RANKS, 8))
    return rank.runtime


def kept(*indices: int) -> list[LeaseRetention]:
    return [LeaseRetention(RANKS, 7, indices, BORN)]


def test_pages_that_the_leader_gave_up_are_freed(runtime: GroupRuntime) -> None:
    assert runtime.leases.apply_retentions(kept(1, 2))
    assert runtime.engine.pages.lease_indices(RANKS).tolist() == [1, 2]
    assert not runtime.leases.apply_retentions(kept(1)), "the same version again says nothing new"


def test_pages_that_a_move_was_told_of_stay_until_it_is_decided(runtime: GroupRuntime) -> None:
    """The plan counts on them: it may write there, and take them over when it is committed."""
    runtime.migration.on_leave(Binding(GROUP, BORN + 1))
    assert not runtime.leases.apply_retentions(kept(1, 2))
    assert runtime.migration.key == RANKS
    assert len(runtime.engine.pages.lease_indices(RANKS)) == 8
    runtime.migration.joined()
    assert runtime.leases.apply_retentions(kept(1, 2)), "every directive repeats it"
    assert runtime.engine.pages.lease_indices(RANKS).tolist() == [1, 2]


def test_pages_of_another_group_are_freed_during_a_move(runtime: GroupRuntime) -> None:
    runtime.migration.on_leave(Binding(Group((Rank(1),), Mode.DP), BORN + 1))
    assert runtime.leases.apply_retentions(kept(3))
    assert runtime.engine.pages.lease_indices(RANKS).tolist() == [3]


def held(runtime: GroupRuntime) -> list[int]:
    """The lease indices of the pair that this rank has pages for."""
    indices: list[int] = runtime.engine.pages.lease_indices(RANKS).tolist()
    return indices


def plan_into_pair(runtime: GroupRuntime) -> None:
    """A move is made here that leads into the pair, if it is committed."""
    move = SimpleNamespace(bindings=(Binding(GROUP, BORN + 1),))
    runtime.migration._pending = PreparedMigration(BORN + 1, cast(Any, move))


def test_pages_of_the_group_that_a_move_leads_into_stay_until_it_is_decided(
    runtime: GroupRuntime,
) -> None:
    """Its leader may have begun on top of them by now."""
    plan_into_pair(runtime)
    assert not runtime.leases.apply_retentions(kept())
    assert len(held(runtime)) == 8
    runtime.migration._pending = None
    assert runtime.leases.apply_retentions(kept())


class Told:
    """A rank that hears of its leases as its main loop does."""

    def __init__(self, runtime: GroupRuntime) -> None:
        self.runtime = runtime
        self.participant = SwitchParticipant(Rank(1), 1)

    def hear(self, order: Directive) -> bool:
        self.participant.on_directive(order)
        return self.runtime.leases.hear(order, self.participant)

    def made(self, move: Move) -> None:
        self.runtime.leases.made(move, self.participant)


def order(epoch: int, members: dict[int, int] | None = None, *leases: LeaseRetention) -> Directive:
    wanted = target("dp4", epoch)
    fields: dict[str, Any] = {} if members is None else {"members": members}
    return directive(wanted, epoch, Phase.PARK, carry=Carry.RESHARD, retentions=leases, **fields)


def test_a_lost_member_of_the_group_that_a_move_leads_into_is_asked_for_when_it_is_decided(
    runtime: GroupRuntime,
) -> None:
    """It may be back in the directive that decides: then the group is joined all the same."""
    told = Told(runtime)
    runtime.leases.formed(RANKS, order(BORN))
    plan_into_pair(runtime)
    assert not told.hear(order(BORN + 2, {0: 2}))
    assert len(held(runtime)) == 8
    runtime.migration._pending = None
    told.made(Resolve(BORN + 1, False, False, False, order(BORN + 2, {0: 2})))
    assert len(held(runtime)) == 8, "another directive counts by now"
    assert told.participant.wanted is not None
    told.made(Resolve(BORN + 1, False, False, False, told.participant.wanted))
    assert held(runtime) == []


@pytest.mark.parametrize("by", ["a leave", "a resolve", "a resolve that joins"])
def test_what_was_told_during_a_move_is_obeyed_before_the_group_is_formed_again(
    runtime: GroupRuntime, by: str
) -> None:
    """What a rank keeps of a group it tells as of the last formation: so it would count as news."""
    told = Told(runtime)
    binding = Binding(GROUP, BORN)
    runtime.migration.on_leave(binding)
    last = order(BORN + 1, None, *kept())
    assert not told.hear(last)
    runtime.migration._is_published = False
    if by == "a leave":
        told.made(Leave(binding, Carry.PAUSE, False, False, last))
    else:
        told.made(Resolve(BORN + 1, False, False, by == "a resolve that joins", last))
    assert len(held(runtime)) == (8 if by == "a resolve that joins" else 0)
