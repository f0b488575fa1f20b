"""What the switch protocol keeps count of: versions, recovery, pace, and what was offered."""

import msgspec
import pytest

from comm_pool.layout import Mode, Rank
from coordinator.model.step_line import sums_of
from coordinator.protocol.messages.rank import LeaseRetention
from coordinator.protocol.messages.steps import ServedSteps
from coordinator.protocol.messages.tasks import Adopted
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Carry, Phase, Stage, TaskId
from coordinator.ranks.outliers import WINDOW_MS, WINDOWS
from coordinator.ranks.roster import Arrival
from coordinator.switching.move_commits import MoveCommits
from tests.harness.coordinator.builders import directive, hello, layout, report, target
from tests.harness.coordinator.participants import PAIR, moved, resolved, serving
from tests.harness.coordinator.switchers import Ranks, restarted, serving_cell
from tests.transcripts.cell import Cell

QUAD = (*PAIR, Rank(2), Rank(3))


def test_the_version_grows_with_everything_that_directives_say() -> None:
    ranks = Ranks()
    versions = [ranks.switcher.version]

    def grew() -> bool:
        versions.append(ranks.switcher.version)
        return versions[-1] > versions[-2]

    ranks.tick()
    assert grew(), "recovery is over"
    for phase in (Phase.PARK, Phase.SWAP):
        assert ranks.switcher.stage.phase is phase
        ranks.acknowledge()
        assert grew()
    ranks.acknowledge()
    assert not grew(), "all serve: there is nothing new to say"
    ranks.hear(0, ranks.switcher.stage, retentions=[LeaseRetention(QUAD, 1, (4,), 1)])
    assert grew(), "others hear what is kept"
    ranks.switcher.retarget(layout("dp4"), Carry.DRAIN, "test", 0)
    assert grew()
    ranks.switcher.retarget(layout("dp4"), Carry.RECOMPUTE, "test", 0)
    assert grew(), "a change of mind about the plan alone"
    assert ranks.switcher.carry is Carry.RECOMPUTE


def test_a_restarted_coordinator_says_so_once_it_knows() -> None:
    cell = serving_cell("tp2+dp2")
    restarted(cell, 0, 1, 2)
    switcher = cell.core._switcher
    before = switcher.version
    told = switcher.directive_for(Rank(0))
    assert told is not None
    assert (told.stage.epoch, told.abandoned_formation) == (0, 0), "it knows of no formation yet"
    cell.open(3)
    cell.report(3)
    cell.tick()
    assert not cell.core.views.is_recovering
    assert switcher.version > before
    assert cell.core.views.epoch == 1


def test_only_the_first_rank_gives_the_others_time() -> None:
    cell = Cell("dp4", lease_ms=1_000, lost_after_ms=1_000, recover_ms=1_000)
    cell.start()
    for _ in range(20):
        cell.tick(100)
    for rank in range(3):
        cell.open(rank)
        cell.report(rank)
        for _ in range(3):
            cell.tick(100)
    assert cell.core.views.is_recovering
    cell.tick(200)
    assert not cell.core.views.is_recovering, "1,100 ms behind the first"


def test_ranks_that_come_during_recovery_change_nothing_before_its_end() -> None:
    ranks = Ranks()
    ranks.switcher.on_hello(hello(0), Arrival.FIRST, 0)
    assert ranks.switcher.epoch == 0
    serve = Ranks().serve()
    epoch = serve.switcher.epoch
    serve.switcher.on_hello(hello(0), Arrival.AGAIN, 0)
    serve.switcher.on_hello(hello(0), Arrival.STALE, 0)
    assert serve.switcher.epoch == epoch, "it is the process that serves"


@pytest.mark.parametrize(("is_known_to_be_gone", "cause"), [(False, "restarted"), (True, "joined")])
def test_a_new_process_that_comes_before_or_behind_the_end_of_the_old_one(
    is_known_to_be_gone: bool, cause: str
) -> None:
    ranks = Ranks().serve()
    if is_known_to_be_gone:
        ranks.roster.on_exited(Rank(3))
        ranks.switcher.lose((Rank(3),), 0)
    arrival = ranks.roster.on_hello(hello(3, 2), 0)
    ranks.switcher.on_hello(hello(3, 2), arrival, 0)
    assert ranks.switcher.log.last(1)[-1].cause == f"rank 3 {cause}"
    assert ranks.switcher.alive == (0, 1, 2, 3)
    formation = {
        binding.group.ranks: binding.formation for binding in ranks.switcher.target.bindings
    }
    assert formation[Rank(3),] == ranks.switcher.epoch


def test_ranks_hear_whose_process_has_ended_until_another_one_comes() -> None:
    ranks = Ranks().serve()

    def ended() -> tuple[Rank, ...]:
        directive = ranks.switcher.directive_for(Rank(0))
        assert directive is not None
        return directive.ended

    assert ended() == ()
    ranks.switcher.lose((Rank(2),), 0)
    assert ended() == (), "it is silent, and may live"
    ranks.roster.on_exited(Rank(3))
    assert ended() == (Rank(3),)
    ranks.roster.on_hello(hello(3, 2), 0)
    assert ended() == ()


def test_what_a_restarted_member_held_of_a_lease_is_lost() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("dp4"), Carry.PAUSE, "test", 0)
    ranks.acknowledge(0, retentions=[LeaseRetention(PAIR, 1, (4,), 1)])
    arrival = ranks.roster.on_hello(hello(1, 2), 0)
    ranks.switcher.on_hello(hello(1, 2), arrival, 0)
    told = ranks.switcher.directive_for(Rank(0))
    assert told is not None
    assert [kept.indices for kept in told.retentions if kept.ranks == PAIR] in ([], [()])


def test_a_rank_whose_steps_are_slow_is_left_out_by_the_switcher() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("dp4"), Carry.RECOMPUTE, "test", 0)
    for _ in Phase:
        ranks.acknowledge()
    assert ranks.switcher.is_serving
    lost: tuple[Rank, ...] = ()
    for _ in range(WINDOWS + 1):
        for rank in range(4):
            seconds = 0.5 if rank == 2 else 0.01
            sums = sums_of([(4 + each % 3, 100 * each, seconds) for each in range(20)])
            said = report(rank, ranks.switcher.stage, target=ranks.switcher.target)
            said = msgspec.structs.replace(
                said, sent_at_ms=ranks.now_ms, served=(ServedSteps(Mode.DP, 1, sums),)
            )
            ranks.roster.on_report(said, ranks.now_ms)
            ranks.switcher.on_report(said, ranks.now_ms)
        ranks.now_ms += WINDOW_MS - 1_000
        for rank in range(4):
            if Rank(rank) in ranks.switcher.alive:
                ranks.hear(rank, ranks.switcher.stage)
        lost += ranks.tick(1_000)
    assert lost == (2,)
    assert ranks.roster.is_out(Rank(2), ranks.now_ms)


def test_a_stall_of_a_quarter_is_counted_as_silence_and_more_is_not() -> None:
    for stall_ms, silent_ms in ((250, 250), (251, 0)):
        ranks = Ranks().serve()
        ranks.tick(stall_ms)
        assert ranks.roster.silent_since(Rank(0), ranks.now_ms) == silent_ms


def test_tasks_offered_in_another_move_are_not_adopted() -> None:
    moves = MoveCommits()
    for rank, epoch in ((0, 5), (1, 4)):
        offer = Adopted(TaskId(f"task-{rank}"), 1, 7)
        offered = msgspec.structs.replace(hello(rank), adopted=(offer,), adopted_in=epoch)
        moves.on_hello(offered)
    moves.on_report(report(2, Stage(6, Phase.PARK), moved=5, heard_in_epoch=6))
    moves.recover()
    assert [rank for rank, _ in moves.take_adopted()] == [0]
    moves.recover()
    assert moves.take_adopted() == [], "it is offered once"


def test_a_seat_tells_what_it_is_joined_to() -> None:
    assert SwitchParticipant(Rank(0), 1).joined is None
    wanted = target("tp2+dp2", 1)
    joined = serving(0, wanted).joined
    assert joined is not None
    assert joined[0] == wanted.bindings[0]
    assert set(joined[1]) == set(PAIR)


def test_a_rank_that_missed_the_park_of_the_next_move_keeps_its_tasks_for_it() -> None:
    order = directive(target("tp4", 3), 3, Phase.MOVE, carry=Carry.RESHARD)
    move = resolved(moved(), order)
    assert (move.is_committed, move.stays_parked) == (False, True)
    assert move.epoch == 2
    assert Stage(3, Phase.MOVE) > Stage(move.epoch, Phase.MOVE)


def test_ranks_heard_behind_a_stall_are_silent_from_then_on() -> None:
    """What waited in sockets while the coordinator stood still is read before it ticks."""
    ranks = Ranks().serve()
    ranks.now_ms = 60_000
    ranks.hear(0, ranks.switcher.stage)
    assert ranks.tick() == ()
    silences = [ranks.roster.silent_since(Rank(rank), ranks.now_ms) for rank in range(4)]
    assert silences == [0, 0, 0, 0]
    lost: tuple[Rank, ...] = ()
    for _ in range(6):
        for rank in (1, 2, 3):
            ranks.hear(rank, ranks.switcher.stage)
        lost += ranks.tick(200)
    assert lost == (0,)


def test_nobody_is_late_for_a_switch_in_which_the_coordinator_stood_still() -> None:
    ranks = Ranks().serve()
    ranks.switcher.retarget(layout("dp4"), Carry.RECOMPUTE, "test", 0)
    ranks.tick(10)
    ranks.acknowledge(0, 1, 2)
    ranks.now_ms += 60_000
    for rank in range(4):
        ranks.hear(rank, Stage(1, Phase.SERVE))
    assert ranks.tick() == (), "it had no time to hear of the switch"
    assert ranks.switcher.alive == (0, 1, 2, 3)
