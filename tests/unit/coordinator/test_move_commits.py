"""The coordinator's side of a move of KV: when it is committed, and who hears of it."""

import pytest

from comm_pool.layout import Group, Mode, Rank
from coordinator.model.events import RankExited, ToGateway
from coordinator.protocol.messages.gateway import Resubmit
from coordinator.protocol.messages.tasks import Adopted, HeldTask
from coordinator.protocol.terms import Carry, Phase, Stage, TaskId
from tests.harness.coordinator.builders import header, hello, layout, submit, target
from tests.harness.coordinator.switchers import Ranks, restarted, serving_cell
from tests.transcripts.cell import Cell


def parked(text: str = "tp4", carry: Carry = Carry.RESHARD) -> Ranks:
    """All ranks have left for another layout, and say so."""
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout(text), carry, "test", 0)
    ranks.acknowledge()
    return ranks


def test_parked_ranks_move_what_they_have_if_that_is_the_plan() -> None:
    assert parked(carry=Carry.PAUSE).switcher.stage == Stage(2, Phase.SWAP)
    ranks = parked()
    assert ranks.switcher.stage == Stage(2, Phase.MOVE)
    directive = ranks.switcher.directive_for(Rank(0))
    assert directive is not None
    assert (directive.movers, directive.moved) == ((0, 1, 2, 3), 0)


def test_ranks_that_stay_where_they_are_do_not_move() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("tp2+tp2"), Carry.RESHARD, "test", 0)
    pair = ranks.switcher.target.bindings[0]
    ranks.acknowledge(0, 1, binding=pair)
    ranks.acknowledge(2, 3)
    directive = ranks.switcher.directive_for(Rank(0))
    assert directive is not None
    assert directive.movers == (2, 3)


def test_nothing_moves_where_nobody_parked() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("tp2+tp2"), Carry.RESHARD, "test", 0)
    for rank in range(4):
        binding = ranks.switcher.target.binding_of(Rank(rank))
        ranks.acknowledge(rank, binding=binding)
    assert ranks.switcher.stage == Stage(2, Phase.SWAP)


def test_a_move_is_committed_when_all_have_their_share() -> None:
    ranks = parked()
    adopted = Adopted(TaskId("a"), 2, 4)
    ranks.acknowledge(0, adopted=(adopted,))
    ranks.acknowledge(1, 2)
    assert ranks.switcher.take_adopted() == []
    ranks.acknowledge(3)
    assert ranks.switcher.stage == Stage(2, Phase.SERVE), "its groups begin at once"
    assert ranks.switcher.take_adopted() == [(Rank(0), adopted)]
    assert ranks.switcher.take_adopted() == []
    directive = ranks.switcher.directive_for(Rank(0))
    assert directive is not None
    assert (directive.movers, directive.moved) == ((), 2)


def test_a_move_that_failed_somewhere_is_not_committed() -> None:
    ranks = parked()
    ranks.acknowledge(0, adopted=(Adopted(TaskId("a"), 2, 4),))
    ranks.acknowledge(1, 2)
    ranks.acknowledge(3, has_failed=True)
    assert ranks.switcher.stage == Stage(2, Phase.SWAP)
    assert ranks.switcher.take_adopted() == []
    directive = ranks.switcher.directive_for(Rank(0))
    assert directive is not None
    assert directive.moved == 0


def test_a_move_that_is_overtaken_is_not_committed() -> None:
    ranks = parked()
    ranks.acknowledge(0, 1, 2)
    ranks.switcher.retarget(layout("dp4"), Carry.RESHARD, "test", 0)
    ranks.acknowledge()
    directive = ranks.switcher.directive_for(Rank(0))
    assert directive is not None
    assert (directive.stage, directive.moved) == (Stage(3, Phase.MOVE), 0)


def test_a_rank_that_missed_a_commit_is_told_of_its_own_move() -> None:
    ranks = parked()
    ranks.acknowledge()
    lost: tuple[Rank, ...] = ()
    while not lost:
        for rank in range(3):
            ranks.hear(rank, Stage(2, Phase.MOVE))
        lost = ranks.tick(100)
    assert lost == (3,)
    for _ in range(3):
        ranks.acknowledge(0, 1, 2)
    ranks.switcher.retarget(layout("tp2+dp1+off1"), Carry.RESHARD, "test", 0)
    ranks.acknowledge(0, 1, 2)
    ranks.acknowledge(0, 1, 2)
    late = ranks.switcher.directive_for(Rank(3))
    other = ranks.switcher.directive_for(Rank(0))
    assert late is not None
    assert other is not None
    assert (late.moved, other.moved) == (2, 4)


def test_groups_that_a_move_prepared_are_formed_anew_if_it_is_overtaken() -> None:
    ranks = parked("tp2+tp2")
    served, new = ranks.switcher.target.bindings
    assert (served.formation, new.formation) == (1, 2)
    ranks.hear(0, Stage(2, Phase.MOVE), binding=served)
    ranks.hear(1, Stage(2, Phase.MOVE), binding=served)
    ranks.acknowledge(2, 3)
    assert ranks.switcher.stage == Stage(2, Phase.SERVE)
    ranks.hear(2, Stage(2, Phase.SERVE), binding=new)
    ranks.switcher.retarget(layout("dp2+tp2"), Carry.RESHARD, "test", 0)
    assert ranks.switcher.target == target("dp2+tp2", 3), "one of its members has not told"


def test_groups_that_all_have_joined_stay_if_another_layout_is_wanted() -> None:
    ranks = parked("tp2+tp2")
    for stage in (Stage(2, Phase.MOVE), Stage(2, Phase.SERVE)):
        for rank in range(4):
            binding = ranks.switcher.target.binding_of(Rank(rank))
            is_in = rank < 2 or stage.phase is Phase.SERVE
            ranks.hear(rank, stage, binding=binding if is_in else None)
    assert ranks.switcher.is_serving
    ranks.switcher.retarget(layout("dp2+tp2"), Carry.RESHARD, "test", 0)
    assert ranks.switcher.target == target("dp2+tp2", 3, 3, 2)


def test_groups_are_granted_what_all_members_will_have_free() -> None:
    ranks = parked()
    for rank, free in enumerate((7, 5, 9, 8)):
        ranks.acknowledge(rank, free=1, free_pages_after_commit=free)
    directive = ranks.switcher.directive_for(Rank(2))
    assert directive is not None
    assert [grant.pages for grant in directive.grants] == [5]


def test_who_takes_no_part_in_a_move_joins_before_groups_begin() -> None:
    """Nobody knows what it will have free; and without peers it has nothing to share."""
    ranks = Ranks().serve()
    for rank in range(4):
        ranks.roster[Rank(rank)].hello = hello(rank, widths=(1, 2, 4) if rank else (1,))
    ranks.switcher.retarget(layout("dp2+tp2"), Carry.RESHARD, "test", 0)
    ranks.acknowledge()
    assert ranks.switcher.stage == Stage(2, Phase.MOVE)
    assert ranks.switcher.directive_for(Rank(0)).movers == (1, 2, 3)  # type: ignore[union-attr]
    ranks.acknowledge()
    assert ranks.switcher.stage == Stage(2, Phase.SWAP)


def test_a_member_of_a_prepared_group_hears_when_its_leader_is_lost() -> None:
    ranks = parked()
    ranks.acknowledge()
    ranks.switcher.lose((Rank(0),), 0)
    directive = ranks.switcher.directive_for(Rank(1))
    assert directive is not None
    assert [(kept.ranks, kept.indices) for kept in directive.retentions] == [
        ((0, 1), ()),
        ((0, 1, 2, 3), ()),
    ]


def moving_cell(**settings: object) -> Cell:
    """Four ranks have acknowledged all but the end of a move."""
    cell = serving_cell("dp4", **settings)
    cell.ranks[Rank(0)].adopted = (Adopted(TaskId("a"), 2, 4),)
    cell.switch("tp4", Carry.RESHARD)
    cell.settle(1, 2, 3)
    for process in cell.ranks.values():
        process.obey()
    for rank in range(4):
        cell.report(rank)
    for process in cell.ranks.values():
        process.obey()
    assert {process.participant.stage for process in cell.ranks.values()} == {Stage(2, Phase.MOVE)}
    return cell


@pytest.mark.parametrize("heard", [False, True])
def test_a_restarted_coordinator_learns_of_a_commit_from_whoever_was_told(heard: bool) -> None:
    cell = moving_cell()
    if heard:
        for rank in range(4):
            cell.report(rank)
        # Only one rank acts on it before the coordinator is gone; others have read of it.
        cell.ranks[Rank(2)].obey()
        for rank in (0, 1, 3):
            cell.ranks[Rank(rank)].participant.wanted = None
    restarted(cell).tick()
    # Epoch 1 moved too, as there was nothing to move.
    told = [process.participant.known_migration for process in cell.ranks.values()]
    assert told == [(2 if heard else 1, 3)] * 4


def test_what_a_process_told_of_a_commit_counts_after_its_end() -> None:
    cell = moving_cell()
    for rank in range(4):
        cell.report(rank)
    cell.ranks[Rank(2)].obey()
    for rank in (0, 1, 3):
        cell.ranks[Rank(rank)].participant.wanted = None
    restarted(cell, 2)
    cell.event(RankExited(Rank(2)))
    for rank in (0, 1, 3):
        cell.open(rank)
        cell.report(rank)
    cell.tick()
    known = [cell.ranks[Rank(rank)].participant.known_migration for rank in (0, 1, 3)]
    assert known == [(2, 3)] * 3


@pytest.mark.parametrize("is_heir_heard", [False, True])
def test_a_task_whose_new_leader_is_not_heard_is_asked_for(*, is_heir_heard: bool) -> None:
    """Its old leader, which hears of the commit, gives it away and says nothing of it."""
    cell = moving_cell(lease_ms=200, lost_after_ms=400)
    for rank in range(4):
        cell.report(rank)
    cell.ranks[Rank(2)].obey()
    for rank in (0, 1, 3):
        cell.ranks[Rank(rank)].participant.wanted = None
    cell.start()
    cell.gateway()
    cell.say(submit("a", attempt=1))
    heard = range(4) if is_heir_heard else range(1, 4)
    held = HeldTask(header("a"), 1, Group((Rank(1),), Mode.DP), 4, paused=False, moves=True)
    for rank in heard:
        cell.open(rank, [held] if rank == 1 else [])
    cell.take()
    while cell.core.views.is_recovering:
        for rank in heard:
            cell.report(rank)
        cell.tick(50)
    asked = [each.message for each in cell.take() if isinstance(each, ToGateway)]
    resubmits = [each for each in asked if isinstance(each, Resubmit)]
    assert resubmits == ([] if is_heir_heard else [Resubmit(TaskId("a"), 2)])
