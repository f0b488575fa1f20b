"""The coordinator's side of a switch, step by step; the whole of it is in the transcripts."""

import pytest

from comm_pool.layout import Rank
from coordinator.model.records import Outcome
from coordinator.protocol.messages.rank import LeaseRetention
from coordinator.protocol.terms import Carry, Phase, Stage
from coordinator.ranks.roster import Arrival
from tests.harness.coordinator.builders import hello, layout, report, target
from tests.harness.coordinator.switchers import Ranks, restarted, serving_cell, settings
from tests.transcripts.cell import Cell


def test_times_that_let_two_layouts_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="at least lease_ms"):
        settings(lost_after_ms=999)
    with pytest.raises(ValueError, match="at least lease_ms"):
        settings(recover_ms=999)


def test_a_stage_is_left_when_all_acknowledged_it() -> None:
    ranks = Ranks()
    ranks.tick()
    assert ranks.switcher.stage == Stage(1, Phase.PARK)
    ranks.acknowledge(0, 1, 2)
    assert ranks.switcher.stage == Stage(1, Phase.PARK)
    ranks.acknowledge(3)
    assert ranks.switcher.stage == Stage(1, Phase.SWAP)
    ranks.acknowledge()
    assert ranks.switcher.stage == Stage(1, Phase.SERVE)
    assert not ranks.switcher.is_serving
    ranks.acknowledge()
    assert ranks.switcher.is_serving


def test_grants_are_what_every_member_has_free() -> None:
    ranks = Ranks()
    ranks.tick()
    ranks.acknowledge()
    for rank, free in enumerate((7, 4, 9, 5)):
        ranks.hear(rank, ranks.switcher.stage, free=free)
    directive = ranks.switcher.directive_for(Rank(0))
    assert directive is not None
    assert [(grant.ranks, grant.pages) for grant in directive.grants] == [
        ((0, 1), 4),
        ((2,), 9),
        ((3,), 5),
    ]


def test_grants_stay_as_they_are_when_pages_come_free() -> None:
    ranks = Ranks().serve()
    granted = ranks.switcher.directive_for(Rank(0))
    ranks.acknowledge(free=3)
    later = ranks.switcher.directive_for(Rank(0))
    assert granted is not None
    assert later is not None
    assert granted.grants == later.grants


def test_a_group_that_stays_keeps_its_formation() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("tp2+tp2"), Carry.PAUSE, "test", 0)
    assert ranks.switcher.target == target("tp2+tp2", 1, 2)
    ranks.switcher.retarget(layout("dp2+tp2"), Carry.PAUSE, "test", 0)
    assert ranks.switcher.target == target("dp2+tp2", 3, 3, 2)


@pytest.mark.parametrize("carry", [Carry.PAUSE, Carry.RESHARD])
def test_a_switch_does_not_wait_for_the_steps_of_a_group_that_stays(carry: Carry) -> None:
    """Its ranks acknowledge between two steps, which may read long prompts."""
    ranks = Ranks().serve()
    assert ranks.switcher.target == target("tp2+dp2", 1, 1, 1)
    ranks.switcher.retarget(layout("tp2+tp2"), carry, "test", 0)
    for _ in range(2):
        assert not ranks.switcher.is_serving
        ranks.acknowledge(2, 3)
    assert ranks.switcher.stage == Stage(2, Phase.SERVE)
    ranks.acknowledge(2, 3)
    assert ranks.switcher.is_serving, "ranks 0 and 1 have said nothing of this epoch"
    ranks.switcher.retarget(layout("tp2+dp2"), carry, "test", 0)
    for _ in range(3):
        ranks.acknowledge(2, 3)
    assert ranks.switcher.is_serving, "nor of this one"
    for _ in range(5):
        assert ranks.tick(200) == ()
        ranks.acknowledge(2, 3)
    assert ranks.tick(1) == (0, 1), "silent ranks are cut out as always"


def test_a_group_that_has_not_served_yet_is_waited_for() -> None:
    ranks = Ranks()
    ranks.tick()
    ranks.acknowledge()
    ranks.acknowledge()
    ranks.acknowledge(0, 2, 3)
    ranks.switcher.retarget(layout("tp2+tp2"), Carry.PAUSE, "test", 0)
    for _ in range(3):
        ranks.acknowledge(2, 3)
    assert ranks.switcher.stage == Stage(2, Phase.PARK), "rank 1 may not have joined it"
    ranks.acknowledge(0, 1)
    assert ranks.switcher.stage == Stage(2, Phase.SWAP)


def test_a_group_that_stays_is_waited_for_once_a_rank_has_left_it() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("tp2+tp2"), Carry.PAUSE, "test", 0)
    ranks.hear(1, Stage(2, Phase.PARK))
    for _ in range(2):
        ranks.acknowledge(2, 3)
    assert ranks.switcher.stage == Stage(2, Phase.SWAP)
    ranks.acknowledge(2, 3)
    assert ranks.switcher.stage == Stage(2, Phase.SWAP), "rank 1 has to join it again"


def test_a_fresh_rank_needs_a_new_formation() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("tp2+dp2"), Carry.PAUSE, "test", 0, fresh=[Rank(0)])
    assert ranks.switcher.target == target("tp2+dp2", 2, 1, 1)


def test_a_formation_is_void_when_its_leader_is_not_in_it() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("tp4"), Carry.PAUSE, "test", 0)
    wide = ranks.switcher.target.bindings[0]
    ranks.hear(1, Stage(2, Phase.SWAP), binding=wide)
    assert void_of(ranks, 1) == 0, "it is wanted"
    ranks.switcher.retarget(layout("dp4"), Carry.PAUSE, "test", 0)
    assert void_of(ranks, 1) == 2
    ranks.hear(0, Stage(2, Phase.SWAP), binding=wide)
    assert void_of(ranks, 1) == 0, "its leader will say when it leaves"
    ranks.hear(0, Stage(3, Phase.PARK))
    assert void_of(ranks, 1) == 2
    assert void_of(ranks, 2) == 0, "it is in no such formation"


def test_a_formation_is_not_void_while_its_leader_may_begin_it_unheard() -> None:
    """It was told that its move is committed, perhaps; then it leads at once."""
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("tp4"), Carry.RESHARD, "test", 0)
    wide = ranks.switcher.target.bindings[0]
    ranks.acknowledge()
    ranks.acknowledge()
    assert ranks.switcher.stage == Stage(2, Phase.SERVE)
    ranks.switcher.retarget(layout("dp4"), Carry.PAUSE, "test", 0)
    ranks.hear(1, Stage(2, Phase.SWAP), binding=wide)
    assert void_of(ranks, 1) == 0
    ranks.hear(0, Stage(3, Phase.PARK))
    assert void_of(ranks, 1) == 2, "it has read of another layout, and does not lead this one"


def void_of(ranks: Ranks, rank: int) -> int:
    directive = ranks.switcher.directive_for(Rank(rank))
    assert directive is not None
    return directive.abandoned_formation


def test_a_silent_rank_is_cut_out_after_its_lease_and_not_before() -> None:
    ranks = Ranks().serve()
    for _ in range(4):
        ranks.tick(200)
        ranks.acknowledge(0, 1, 2)
    assert ranks.tick(200) == ()
    ranks.acknowledge(0, 1, 2)
    assert ranks.tick(1) == (3,)
    assert ranks.switcher.alive == (0, 1, 2)
    assert ranks.switcher.stage == Stage(2, Phase.SERVE), "the others serve on"


def test_a_coordinator_that_stood_still_blames_nobody() -> None:
    ranks = Ranks().serve()
    assert ranks.tick(60_000) == ()
    assert ranks.switcher.is_serving


def test_a_rank_that_comes_anew_serves_alone() -> None:
    ranks = Ranks().serve()
    ranks.switcher.lose((Rank(1),), 0)
    assert ranks.switcher.target.layout == layout("dp1+off1+dp2")
    ranks.roster.on_hello(hello(1, 2), 0)
    ranks.switcher.on_hello(hello(1, 2), Arrival.RESTARTED, 0)
    assert ranks.switcher.target.layout == layout("dp4")


def test_an_epoch_from_before_is_overtaken() -> None:
    ranks = Ranks().serve()
    said = report(3, Stage(9, Phase.SWAP), sent_at_ms=1, target=target("tp4", 9))
    ranks.roster.on_report(said, 1)
    ranks.switcher.on_report(said, 1)
    assert ranks.switcher.stage == Stage(10, Phase.PARK)


def test_another_layout_of_the_same_epoch_is_overtaken() -> None:
    ranks = Ranks().serve()
    said = report(3, Stage(1, Phase.SERVE), sent_at_ms=1, target=target("tp4", 1))
    ranks.roster.on_report(said, 1)
    ranks.switcher.on_report(said, 1)
    assert ranks.switcher.stage == Stage(2, Phase.PARK)


def test_draining_ends_at_its_limit() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("dp4"), Carry.DRAIN, "test", 0)
    assert ranks.switcher.is_draining
    ranks.tick(200)
    ranks.acknowledge(2, 3)
    ranks.tick(200)
    assert ranks.switcher.is_draining
    version = ranks.switcher.version
    ranks.tick(100)
    assert [ranks.switcher.carry] == [Carry.RECOMPUTE]
    assert ranks.switcher.version > version


def test_a_wait_for_stragglers_ends_at_its_limit_in_a_move() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("dp4"), Carry.SPECULATE, "test", 0)
    assert ranks.switcher.is_speculating
    ranks.tick(400)
    assert ranks.switcher.is_speculating
    version = ranks.switcher.version
    ranks.tick(100)
    assert ranks.switcher.carry is Carry.RESHARD
    assert ranks.switcher.version > version


def test_nothing_is_waited_for_behind_another_switch_or_when_ranks_go() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("dp4"), Carry.PAUSE, "test", 0)
    ranks.switcher.retarget(layout("tp4"), Carry.SPECULATE, "test", 0)
    assert ranks.switcher.carry is Carry.RESHARD
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("dp4"), Carry.SPECULATE, "test", 0)
    ranks.switcher.lose((Rank(3),), 0)
    assert ranks.switcher.carry is Carry.RESHARD
    assert not ranks.switcher.is_speculating


def test_who_is_gone_cannot_be_lost_again() -> None:
    ranks = Ranks().serve()
    ranks.switcher.lose([Rank(3)], 0)
    epoch = ranks.switcher.epoch
    ranks.switcher.lose([Rank(3)], 0)
    assert ranks.switcher.epoch == epoch


def test_who_moved_into_a_group_hears_of_a_lost_member_before_it_is_granted_pages() -> None:
    """What it has leased for the group by then would be leased for ever."""
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("dp4"), Carry.PAUSE, "test", 0)
    for _ in Phase:
        ranks.acknowledge()
    ranks.roster.on_hello(hello(0, 2, widths=(1,)), 0)
    ranks.switcher.retarget(layout("dp2+tp2"), Carry.RESHARD, "test", 0, fresh=[Rank(0)])
    for expected in (Phase.MOVE, Phase.SWAP):
        for rank in range(4):
            ranks.hear(rank, ranks.switcher.stage, incarnation=1 if rank else 2)
        assert ranks.switcher.stage.phase is expected
    ranks.switcher.lose([Rank(3)], 0)
    directive = ranks.switcher.directive_for(Rank(2))
    assert directive is not None
    assert [(each.ranks, each.indices) for each in directive.retentions] == [((2, 3), ())]


def test_kept_pages_go_to_members_and_are_frozen_when_their_group_serves() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("dp4"), Carry.PAUSE, "test", 0)
    first = LeaseRetention((Rank(0), Rank(1)), 1, (3, 4), formation=1)
    ranks.hear(0, ranks.switcher.stage, retentions=[first])
    for rank, kept in ((0, (first,)), (1, (first,)), (2, ())):
        directive = ranks.switcher.directive_for(Rank(rank))
        assert directive is not None
        assert directive.retentions == kept
    for _ in Phase:
        ranks.acknowledge()
    ranks.switcher.retarget(layout("tp2+dp2"), Carry.PAUSE, "test", 0)
    ranks.acknowledge()
    ranks.acknowledge()
    assert ranks.switcher.stage.phase is Phase.SERVE
    later = LeaseRetention((Rank(0), Rank(1)), 2, (4,), formation=1)
    ranks.hear(0, ranks.switcher.stage, retentions=[later])
    directive = ranks.switcher.directive_for(Rank(1))
    assert directive is not None
    assert directive.retentions == (first,)


def test_pages_that_came_free_are_worth_forming_anew_for() -> None:
    ranks = Ranks()
    ranks.tick()
    ranks.acknowledge()
    ranks.acknowledge(free=4)
    ranks.acknowledge(free=0)
    assert ranks.switcher.starved() == ()
    ranks.hear(0, ranks.switcher.stage, free=2)
    ranks.hear(2, ranks.switcher.stage, free=2)
    assert ranks.switcher.starved() == (2,), "rank 1 has nothing to add to its pair"


def test_a_group_has_no_use_for_what_its_larger_member_has_beyond_the_smallest() -> None:
    """Rank 0 has more whole layers than rank 1, and so fewer pages."""
    ranks = Ranks()
    ranks.tick()
    ranks.acknowledge()
    ranks.hear(1, ranks.switcher.stage, free=40)
    for rank in (0, 2, 3):
        ranks.hear(rank, ranks.switcher.stage, free=10)
    ranks.tick()
    directive = ranks.switcher.directive_for(Rank(1))
    assert directive is not None
    granted = {grant.ranks: grant.pages for grant in directive.grants}
    assert granted[Rank(0), Rank(1)] == 10
    ranks.hear(0, ranks.switcher.stage, free=0)
    ranks.hear(1, ranks.switcher.stage, free=30)
    assert Rank(0) not in ranks.switcher.starved()


@pytest.mark.parametrize(
    ("running", "blocks_free", "starved"), [(1, 0, (2,)), (2, 0, ()), (1, 1, ()), (0, 0, ())]
)
def test_one_task_that_has_all_pages_gets_the_few_that_came_free(
    running: int, blocks_free: int, starved: tuple[int, ...]
) -> None:
    ranks = Ranks()
    ranks.tick()
    ranks.acknowledge()
    ranks.acknowledge(free=8)
    ranks.acknowledge(free=0)
    binding = ranks.switcher.target.binding_of(Rank(2))
    has = {"running": running, "blocks_free": blocks_free}
    ranks.hear(2, ranks.switcher.stage, free=1, binding=binding, **has)
    assert ranks.switcher.starved() == starved


@pytest.mark.parametrize("plan", [Carry.PAUSE, Carry.DRAIN, Carry.RECOMPUTE])
def test_only_ranks_that_are_parked_for_a_migration_copy(plan: Carry) -> None:
    """Ranks that joined under an earlier plan publish nothing; a mover would wait for them."""
    ranks = Ranks().serve()
    switcher = ranks.switcher
    switcher.retarget(layout("dp2+tp2"), plan, "test", 0)
    epoch = switcher.epoch
    ranks.acknowledge(0, 1, 2)  # Then ranks 0 and 1 join, but their reports are late.
    switcher.retarget(layout("dp2+tp2"), Carry.RESHARD, "test", 0)
    assert switcher.stage == Stage(epoch + 1, Phase.PARK)
    ranks.hear(3, Stage(epoch, Phase.PARK))
    for rank in (0, 1):
        ranks.hear(rank, switcher.stage, binding=switcher.target.binding_of(Rank(rank)))
    ranks.acknowledge(2)
    assert switcher.stage == Stage(epoch + 1, Phase.PARK), "rank 3 knows an earlier plan only"
    ranks.acknowledge(3)
    directive = switcher.directive_for(Rank(2))
    assert directive is not None
    assert (directive.stage.phase, directive.movers) == (Phase.MOVE, (2, 3))


@pytest.mark.parametrize("plan", [Carry.PAUSE, Carry.DRAIN, Carry.RECOMPUTE])
def test_a_plan_under_which_nothing_migrates_takes_over_in_the_same_epoch(plan: Carry) -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("dp4"), Carry.RESHARD, "test", 0)
    epoch = ranks.switcher.epoch
    ranks.switcher.retarget(layout("dp4"), plan, "test", 0)
    assert (ranks.switcher.epoch, ranks.switcher.carry) == (epoch, plan)


def test_the_log_keeps_the_last_switches() -> None:
    ranks = Ranks().serve()
    for text in ("dp4", "tp4", "tp2+tp2"):
        ranks.switcher.retarget(layout(text), Carry.PAUSE, "test", 0)
    records = ranks.switcher.log.last(9)
    assert [(each.epoch, each.outcome) for each in records] == [
        (2, Outcome.SUPERSEDED),
        (3, Outcome.SUPERSEDED),
        (4, Outcome.UNDER_WAY),
    ]
    assert [each.from_layout for each in records] == ["tp2+dp2"] * 3
    assert ranks.switcher.log.last(0) == ()


def test_ranks_that_agree_go_on_as_they_are() -> None:
    cell = serving_cell("tp2+dp2")
    cell.switch("tp2+tp2")
    cell.settle()
    restarted(cell).tick()
    assert cell.core.views.is_serving
    assert (cell.core.views.epoch, cell.core.views.layout()["layout"]) == (2, "tp2+tp2")


def test_leases_are_renewed_while_the_coordinator_collects_reports() -> None:
    cell = serving_cell("dp2")
    leader = cell.ranks[Rank(0)].participant
    before = leader.lease_until
    cell.now_ms += 500
    restarted(cell, 0)
    assert leader.lease_until == before + 500
    assert leader.stage.epoch == 1
    assert cell.core.views.is_recovering


def test_a_switch_that_was_under_way_is_taken_up() -> None:
    cell = serving_cell("dp4")
    cell.switch("tp2+tp2")
    cell.settle(0, 1)
    restarted(cell).tick()
    assert cell.core.views.epoch == 3
    cell.settle()
    assert cell.core.views.is_serving
    assert cell.core.views.layout()["layout"] == "tp2+tp2"


def test_a_rank_that_was_restarted_meanwhile_serves_alone() -> None:
    cell = serving_cell("tp4")
    cell.restart(3)
    restarted(cell).tick()
    cell.settle()
    assert cell.core.views.layout()["layout"] == "dp4"
    assert cell.core.why_unreachable(cell.layout("tp4")) is not None


def test_a_first_layout_that_cannot_be_formed_is_not_tried() -> None:
    cell = Cell("tp2+tp2")
    cell.restart(3)
    cell.serve()
    assert cell.core.views.is_serving
    assert cell.core.views.layout()["layout"] == "tp2+dp2"


def test_the_first_rank_that_comes_late_gives_the_others_time() -> None:
    cell = Cell("dp4", lease_ms=1_000, lost_after_ms=1_000, recover_ms=1_000)
    cell.start()
    for _ in range(50):
        cell.tick(100)
    cell.open(0)
    cell.report(0)
    for _ in range(9):
        cell.tick(100)
    assert cell.core.views.is_recovering, "the others are still loading"
    for rank in (1, 2, 3):
        cell.open(rank)
        cell.report(rank)
    cell.tick()
    cell.settle()
    assert cell.core.views.layout()["layout"] == "dp4"
    assert cell.core.views.layout()["epoch"] == 1


def test_ranks_that_do_not_come_are_left_out_when_their_lease_is_over() -> None:
    cell = serving_cell("tp2+dp2", lease_ms=1_000, lost_after_ms=1_000, recover_ms=1_000)
    restarted(cell, 0, 2, 3)
    for _ in range(9):
        cell.tick(100)
    assert cell.core.views.is_recovering
    cell.tick(100)
    cell.settle(0, 2, 3)
    assert cell.core.views.layout()["layout"] == "dp1+off1+dp2"
    assert cell.core.views.is_serving
