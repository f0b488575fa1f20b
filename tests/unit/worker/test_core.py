"""What a rank does, event by event, over an engine in memory: what its core asks for, in order."""

import pytest

from comm_pool.formations import PeerLostError
from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Stop
from coordinator.protocol.messages.tasks import TaskEnded
from coordinator.protocol.switch_actions import Reshard, Resolve
from coordinator.protocol.terms import Carry, EndCause, Phase, ReturnCause, Stage, TaskId, Tier
from tests.harness.worker.core_cell import CoreCell, CoreRank, drop, kinds
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_scheduler import token_at
from worker.io.session import HelloWanted
from worker.rank.departure import STEPS_MAX
from worker.rank.engine import NoRoomError
from worker.rank.events import (
    CopiesDone,
    DetachedStepEnded,
    Done,
    DrainQueues,
    Effect,
    FinishStep,
    Follow,
    LeadStep,
    Overtaken,
    Prepare,
    Prepared,
    Publish,
    QueuesDrained,
    SendHello,
    SendReport,
    StepFailed,
    StepFinished,
    Tick,
    Wait,
)

TOKENS = 30
MS = 1_000_000


def ended(rank: CoreRank) -> list[TaskEnded]:
    return [each for report in rank.reports for each in report.ended]


# ---------------------------------------------------------------------- one event, one effect


def test_a_rank_without_work_reports_and_waits() -> None:
    core = CoreRank(FakeCell(1)).core
    assert core.handle(Tick(), MS) == DrainQueues()
    report = core.handle(QueuesDrained(()), 2 * MS)
    assert isinstance(report, SendReport)
    assert (report.report.sent_at_ms, report.report.stage) == (2, Stage(0, Phase.PARK))
    assert core.handle(Done(), 2 * MS) == Prepare(None)
    assert core.handle(Prepared(awaits_peers=False), 2 * MS) == Wait(0.05)
    assert core.handle(Done(), 9 * MS) is None


def test_a_leader_with_work_steps_in_every_pass_and_asks_for_nothing_else() -> None:
    cell = CoreCell("dp1", world=1)
    (rank,) = cell.ranks
    cell.place_task("a")
    assert kinds(rank.turn(3)) == ["LeadStep"] * 3
    assert rank.loop.effects[0] == LeadStep(1)


def test_a_report_is_sent_on_news_and_with_each_heartbeat() -> None:
    cell = CoreCell("dp1", world=1)
    (rank,) = cell.ranks
    core, now = cell.ranks[0].core, 10**15
    cell.place_task("a")
    rank.turn(2)

    def step(now_ns: int) -> Effect | None:
        assert core.handle(Tick(), now_ns) == LeadStep(1)
        rank.runtime.lead_step(1)
        effect = core.handle(StepFinished(7), now_ns)
        if effect is not None:
            assert core.handle(Done(), now_ns) is None
        return effect

    assert isinstance(step(now), SendReport)
    assert step(now + MS - 1) is None
    with_progress = step(now + MS)
    assert isinstance(with_progress, SendReport)
    assert [each.task for each in with_progress.report.progress] == ["a"]
    assert core.handle(CopiesDone(1, 0.5, 9), now + MS) is None
    with_times = step(now + MS + 1)
    assert isinstance(with_times, SendReport), "copies are done"
    assert with_times.report.progress == ()
    assert [each.reshard_us for each in with_times.report.times] == [500_000]
    assert core.handle(DetachedStepEnded(now), now + MS + 2) is None
    assert isinstance(step(now + MS + 3), SendReport)


def test_a_follower_reads_its_step_queue() -> None:
    cell = CoreCell("tp2")
    follower = cell.ranks[1]
    assert kinds(follower.turn()) == ["Follow"]
    read = follower.loop.effects[0]
    assert isinstance(read, Follow)
    assert read.wait_s == 0.01
    cell.place_task("a")
    cell.turn(3)
    assert follower.runtime.steps.count == cell.ranks[0].runtime.steps.count == 3


def test_it_waits_shortly_for_peers_that_have_not_parked() -> None:
    core = CoreCell("dp1", world=1).ranks[0].core
    effect = core.handle(Tick(), 1)
    while not isinstance(effect, Prepare):
        effect = core.handle(Done(), 1)
    assert core.handle(Prepared(awaits_peers=True), 1) == Wait(0.0003)
    assert core.handle(Done(), 1) is None


def test_a_session_begins_with_a_hello() -> None:
    cell = CoreCell("dp1", world=1)
    cell.place_task("a")
    cell.turn()
    core = cell.ranks[0].core
    assert isinstance(core.handle(HelloWanted(), 1), SendReport)
    hello = core.handle(Done(), 1)
    assert isinstance(hello, SendHello)
    assert [each.header.task for each in hello.hello.held] == ["a"]


def test_a_new_coordinator_hears_of_a_commit_that_the_rank_has_only_read() -> None:
    """The session repeats the last report after the hello; the rank may block before the next."""
    cell = CoreCell("dp2")
    cell.place_task("a")
    cell.turn(2)
    cell.retarget("tp2")
    cell.ask(cell.wanted(Phase.PARK, Carry.RESHARD), ends=cell.all_parked)
    cell.ask(cell.wanted(Phase.MOVE, Carry.RESHARD))
    cell.moved = 2
    core = cell.ranks[0].core
    assert core.handle(cell.wanted(Phase.SWAP, Carry.RESHARD), 1) is None
    report = core.handle(HelloWanted(), 1)
    assert isinstance(report, SendReport)
    assert (report.report.stage.phase, report.report.moved) == (Phase.MOVE, 2)


def test_a_leader_counts_the_urgent_among_its_waiting_tasks() -> None:
    cell = CoreCell("dp1", world=1, pages=5)
    (rank,) = cell.ranks
    for name in "abcd":
        cell.place_task(name, tier=Tier.STANDARD if name == "c" else Tier.BATCH)
    rank.turn(3)
    report = rank.reports[-1]
    assert (report.running, report.waiting) == (2, 2)
    assert report.urgent_waiting == 1


def test_who_is_to_stop_reports_and_waits_for_nothing() -> None:
    (rank,) = CoreCell("dp1", world=1).ranks
    rank.hear(Stop("enough"))
    assert kinds(rank.turn()) == []
    assert rank.core.stop_reason == "enough"


def test_the_error_of_a_formation_that_was_left_ends_the_process() -> None:
    cell = CoreCell("dp1", world=1)
    (rank,) = cell.ranks
    cell.place_task("a")
    rank.turn()
    assert isinstance(rank.core.handle(Tick(), 1), LeadStep)
    with pytest.raises(PeerLostError):
        rank.core.handle(StepFailed(PeerLostError(99)), 1)


def test_a_command_that_fails_within_a_pass_does_not_end_the_pass() -> None:
    """A migration swallows what goes wrong while it reads the inbox, and is itself a failed one."""
    core = CoreRank(FakeCell(1)).core
    assert core.handle(Tick(), 1) == DrainQueues()
    assert core.handle(drop("a"), 1) == FinishStep()
    with pytest.raises(PeerLostError):
        core.handle(StepFailed(PeerLostError(99)), 1)
    assert isinstance(core.handle(QueuesDrained(()), 1), SendReport)


def test_an_error_where_no_step_runs_ends_the_process() -> None:
    (rank,) = CoreCell("dp1", world=1).ranks
    assert rank.core.handle(Tick(), 1) == Prepare(None)
    with pytest.raises(PeerLostError):
        rank.core.handle(StepFailed(PeerLostError(1)), 1)


def test_a_rank_shows_its_whole_state_in_a_line() -> None:
    cell = CoreCell("dp2", pages=9)
    leader, other = cell.ranks
    pages = "<0 of 9 pages free, owned 1-8>"
    assert (
        repr(other.core) == f"<rank 1: 1.SERVE SERVING_LEADER dp1@1 recompute, no tasks, {pages}>"
    )
    cell.place_task("a", tokens=9)
    leader.turn(2)
    cell.retarget("tp2")
    leader.hear(cell.wanted(Phase.PARK, Carry.RESHARD))
    leader.turn()
    assert leader.core.handle(drop("a"), 1) is None
    parked = "rank 0: 2.PARK UNDECIDED no group reshard, tasks a, its step deferred, Drop a pending"
    assert repr(leader.core) == f"<{parked}, {pages}>"
    other.hear(Stop("enough"))
    other.turn()
    assert "no tasks, stops: enough, <" in repr(other.core)


def test_a_follower_in_an_aborted_formation_shows_it() -> None:
    cell = CoreCell("tp2", pages=9)
    follower = cell.ranks[1]
    follower.engine.communicators.abort(cell.target.bindings[0].group.ranks, 1)
    pages = "<0 of 9 pages free, leased to 0-1 as 1-8>"
    shown = "rank 1: 1.SERVE SERVING_FOLLOWER tp2@1 recompute, no tasks, formation aborted"
    assert repr(follower.core) == f"<{shown}, {pages}>"


def test_a_leader_in_an_aborted_formation_waits_for_no_task_to_end() -> None:
    """Its tasks are returned, but what its scheduler has of them is there until it leaves."""
    cell = CoreCell("dp2")
    leader = cell.ranks[0]
    cell.place_task("a", tokens=TOKENS)
    leader.turn(2)
    cell.retarget("tp2")
    leader.hear(cell.wanted(Phase.PARK, Carry.DRAIN))
    leader.turn()
    assert leader.core.participant.stage.epoch == 1, "its task goes on"
    assert isinstance(leader.core.handle(Tick(), 1), LeadStep)
    effect = leader.core.handle(StepFailed(NoRoomError("CUDA out of memory.")), 1)
    while effect is not None:
        effect = leader.core.handle(Done(), 1)
    leader.turn()
    assert leader.core.participant.stage == Stage(2, Phase.SWAP), "it has left, and joined"


# ---------------------------------------------------------------------- switches


@pytest.mark.parametrize("last_step", ["deferred", "in flight"])
@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, ("dp2", "tp2", "dp2")),
        (4, ("dp4", "tp2+tp2", "tp4", "tp2+dp2", "dp4")),
    ],
    ids=str,
)
def test_streams_go_on_when_cores_switch(
    world: int, layouts: tuple[str, ...], last_step: str
) -> None:
    cell = CoreCell(layouts[0], world)
    for each in cell.ranks:
        each.engine.is_synchronous = last_step != "in flight"
    for number in range(world):
        prompt = range(100 * number, 100 * number + 30 + 7 * number)
        cell.place_task(f"task {number}", number % len(cell.target.bindings), prompt, TOKENS)
    for layout in layouts[1:]:
        cell.turn(5)
        cell.move(layout)
    cell.turn(2 * TOKENS)
    for name, prompt_ in cell.prompts.items():
        wanted = [token_at(prompt_, len(prompt_) + number) for number in range(TOKENS)]
        assert cell.streams[name] == wanted, name
    assert not any(each.returned for each in cell.ranks), "no task was computed again"


def test_a_leader_that_moves_defers_a_step_leaves_and_publishes() -> None:
    cell = CoreCell("dp2")
    cell.place_task("a")
    leader = cell.ranks[0]
    leader.turn(2)
    cell.retarget("tp2")
    leader.hear(cell.wanted(Phase.PARK, Carry.RESHARD))
    effects = leader.turn()
    assert kinds(effects)[:3] == ["DeferStep", "Leave", "Publish"]
    assert Publish(2) in effects
    assert leader.reports[-1].stage == Stage(2, Phase.PARK)
    assert leader.participant.is_moving


def test_a_group_that_recomputes_finishes_its_step_first() -> None:
    cell = CoreCell("dp2")
    cell.place_task("a")
    leader = cell.ranks[0]
    leader.turn(2)
    cell.retarget("tp2")
    leader.hear(cell.wanted(Phase.PARK, Carry.RECOMPUTE))
    assert kinds(leader.turn())[:3] == ["FinishStep", "Leave", "Join"]


def test_a_drop_during_a_move_waits_for_its_end() -> None:
    cell = CoreCell("dp2")
    cell.place_task("a")
    cell.place_task("b")
    leader = cell.ranks[0]
    leader.turn(3)
    cell.retarget("tp2")
    cell.ask(cell.wanted(Phase.PARK, Carry.RESHARD), ends=cell.all_parked)
    leader.hear(drop("a", 2), HelloWanted())  # type: ignore[arg-type]
    assert "Obey" not in kinds(leader.turn())
    assert [each.header.task for each in leader.hellos[-1].held] == ["b"]
    cell.ask(cell.wanted(Phase.MOVE, Carry.RESHARD))
    cell.moved = 2
    leader.hear(cell.wanted(Phase.SWAP, Carry.RESHARD))
    assert kinds(leader.turn())[:4] == ["Resolve", "FinishStep", "Obey", "Join"]
    (of_a,) = ended(leader)
    assert (of_a.task, of_a.cause) == (TaskId("a"), EndCause.CANCELLED)


def test_what_a_migration_fills_stays_together_if_a_task_ends_before_its_group_is_joined() -> None:
    """On the rank that had the task, the pages of these lease indices are in another order."""
    cell = CoreCell("dp2", pages=9)
    cell.place_task("a", 1, prompt=range(90))
    cell.turn(3)
    cell.retarget("tp2")
    cell.ask(cell.wanted(Phase.PARK, Carry.RESHARD), ends=cell.all_parked)
    cell.ask(cell.wanted(Phase.MOVE, Carry.RESHARD))
    leader = cell.ranks[0]
    leader.hear(drop("a", 2))
    cell.moved = cell.epoch
    for phase in (Phase.SWAP, Phase.SERVE):
        cell.ask(cell.wanted(phase, Carry.RESHARD))
    assert [each.task for each in ended(leader)] == ["a"]
    cell.place_task("b")
    cell.turn(3)
    cell.form("dp2", Carry.PAUSE)
    for name in "cd":  # They take every page that is free.
        cell.place_task(name, 1, prompt=range(200, 290))
    cell.turn(3)
    retained = leader.reports[-1].retentions
    cell.retarget("tp2")
    for phase in (Phase.PARK, Phase.SWAP, Phase.SERVE):
        cell.ask(cell.wanted(phase, Carry.PAUSE, retentions=retained))
    cell.turn(2 * TOKENS)
    prompt = cell.prompts["b"]
    wanted = [token_at(prompt, len(prompt) + number) for number in range(TOKENS)]
    assert cell.streams["b"] == wanted


def test_a_move_that_another_layout_overtakes_stays_undecided() -> None:
    cell = CoreCell("dp2")
    cell.place_task("a")
    cell.turn(2)
    cell.retarget("tp2")
    cell.ask(cell.wanted(Phase.PARK, Carry.RESHARD), ends=cell.all_parked)
    asked = cell.wanted(Phase.MOVE, Carry.RESHARD)
    leader = cell.ranks[0]
    core = leader.core
    leader.hear(asked)
    leader.loop._take_inbox()
    assert core.handle(Tick(), 1) == Reshard(asked)
    assert not core.is_overtaken(asked)
    cell.retarget("dp2")
    assert core.handle(cell.wanted(Phase.PARK, Carry.RESHARD), 2) is None, "it comes meanwhile"
    assert core.is_overtaken(asked)
    resolve = core.handle(Overtaken(), 3)
    assert isinstance(resolve, Resolve)
    assert (resolve.is_committed, resolve.stays_parked) == (False, True)


def test_a_leader_steps_on_while_its_peer_does_and_then_leaves() -> None:
    cell = CoreCell("dp2")
    cell.place_task("a")
    leader = cell.ranks[0]
    leader.turn(3)
    an_hour_ns = 3_600_000 * MS
    leader.engine.mailboxes[Rank(1)].expect_end(leader.runtime.steps.ends_ns + an_hour_ns)
    cell.retarget("tp2")
    leader.hear(cell.wanted(Phase.PARK, Carry.RESHARD))
    assert kinds(leader.turn(STEPS_MAX)) == ["LeadStep"] * STEPS_MAX
    assert kinds(leader.turn())[:3] == ["DeferStep", "Leave", "Publish"]


@pytest.mark.parametrize("born", [1, 2])
def test_a_group_with_a_new_process_is_probed_before_its_first_step(born: int) -> None:
    cell = CoreCell("dp2")
    leader = cell.ranks[0]
    cell.retarget("tp2")
    for phase in (Phase.PARK, Phase.SWAP, Phase.SERVE):
        leader.hear(cell.wanted(phase, members={1: born}))
    effects = kinds(leader.turn())
    served = effects[effects.index("Serve") :]
    assert served == (["Serve", "Probe"] if born == 2 else ["Serve"])


def test_a_lease_whose_member_is_lost_is_given_up_with_its_paused_tasks() -> None:
    cell = CoreCell("tp2", pages=9)
    cell.place_task("a")
    cell.turn(3)
    cell.form("dp2", Carry.PAUSE)
    leader, follower = cell.ranks
    assert "leased to 0-1 as" in repr(leader.core)
    assert "leased to 0-1 as" in repr(follower.core)
    lost = cell.wanted(Phase.SERVE, Carry.PAUSE, members={1: 2})
    assert leader.core.handle(lost, 1) is None
    assert "leased" not in repr(leader.core)
    assert leader.returned == [("a", ReturnCause.RECOMPUTE)]
    lost = cell.wanted(Phase.SERVE, Carry.PAUSE, members={0: 2})
    assert follower.core.handle(lost, 1) is None
    assert "leased" not in repr(follower.core)


def test_a_member_that_was_only_out_of_reach_hears_that_its_lease_is_given_up() -> None:
    """The leader took it for lost, and no task is left whose return would tell of the lease."""
    cell = CoreCell("tp2", pages=9)
    cell.retarget("dp2")
    cell.ask(cell.wanted(Phase.PARK, Carry.RESHARD), ends=cell.all_parked)
    leader, follower = cell.ranks
    cell.retarget("dp2")
    leader.hear(cell.wanted(Phase.PARK, members={1: 2}))
    leader.turn()
    assert "leased" not in repr(leader.core)
    follower.hear(cell.wanted(Phase.PARK, retentions=leader.reports[-1].retentions))
    follower.turn()
    assert "leased" not in repr(follower.core)
