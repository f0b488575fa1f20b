"""What a rank does in a group that has lost a member: the step does not count, nobody waits."""

from typing import Any

import pytest

from comm_pool.formations import PeerLostError
from coordinator.protocol.switch_actions import Leave
from coordinator.protocol.terms import Binding, Carry, Phase, ReturnCause
from tests.harness.worker.core_cell import CoreCell, kinds
from worker.io.step_queue import LeaveGroup, send
from worker.rank.engine import NoRoomError
from worker.rank.events import Effect, Follow, ForgetSteps, LeadStep, StepFailed, Tick

NAMES = ["a", "b"]
RECOMPUTED = [(name, ReturnCause.RECOMPUTE) for name in NAMES]


class Stage:
    """A rank that serves in tp2+dp2; leaders have tasks that run, and a last step is deferred."""

    def __init__(self, rank: int) -> None:
        self.cell = CoreCell("tp2+dp2", world=4, pages=33)
        self.rank = self.cell.ranks[rank]
        self.core, self.participant = self.rank.core, self.rank.participant
        binding = self.participant.binding
        assert binding is not None
        self.binding: Binding = binding
        group = self.cell.target.bindings.index(binding)
        leader = self.cell.leader_of(group)
        for name in NAMES:
            self.cell.place_task(name, group, tokens=9)
        leader.turn()
        leader.runtime.defer_step(1)
        if self.rank is not leader:
            self.rank.turn(3)
        self.steps = self.rank.runtime.steps
        self.mode = self.rank.engine.of_width(binding.group.width)
        self.communicators = self.rank.engine.communicators
        assert (self.has_given_up_steps, self.rank.returned) == (False, [])

    @property
    def has_given_up_steps(self) -> bool:
        """Whether neither the rank nor its runner knows of the last step and its tasks."""
        assert self.steps.has_deferred_step == bool(self.mode.known)
        return not self.steps.has_deferred_step

    @property
    def returned(self) -> list[Any]:
        """The tasks that go back to the coordinator."""
        return self.rank.returned

    @property
    def oom_formation(self) -> int:
        """The formation without room, as of the last report."""
        return self.rank.reports[-1].oom_formation

    def lose(self) -> None:
        """Another member finds that one is lost."""
        self.communicators.abort(self.binding.group.ranks, self.binding.formation)

    def fail(self, error: PeerLostError | NoRoomError) -> None:
        """End the rank's next step with an error."""
        now_ns = 10**15
        effect = self.core.handle(Tick(), now_ns)
        assert isinstance(effect, LeadStep | Follow)
        effect = self.core.handle(StepFailed(error), now_ns)
        while effect is not None:
            effect = self.core.handle(self.rank.loop._result_of(effect), now_ns)

    def want(self, layout: str, carry: Carry) -> None:
        """Let the rank hear of another layout."""
        self.cell.retarget(layout)
        self.rank.hear(self.cell.wanted(Phase.PARK, carry))

    def leave(self, carry: Carry, layout: str = "dp4") -> Leave:
        """Let the rank hear of another layout; return how it leaves its group."""
        self.want(layout, carry)
        # A follower knows of the loss after a pass.
        (leave,) = (each for each in self.rank.turn(2) if isinstance(each, Leave))
        return leave


def lost(formation: int = 1) -> PeerLostError:
    return PeerLostError(formation)


def no_room() -> NoRoomError:
    return NoRoomError("CUDA out of memory.")


def test_a_step_that_succeeds_is_left_alone() -> None:
    stage = Stage(0)
    stage.rank.turn()
    assert not stage.core.is_in_aborted_formation
    assert not stage.returned


def test_a_leader_gives_its_tasks_back_and_tells_the_others() -> None:
    stage = Stage(0)
    stage.fail(lost())
    assert stage.core.is_in_aborted_formation
    assert stage.cell.ranks[1].core.is_in_aborted_formation
    assert stage.returned == RECOMPUTED
    assert stage.has_given_up_steps
    assert "LeadStep" not in kinds(stage.rank.turn())


def test_a_follower_has_no_tasks_to_give_back() -> None:
    stage = Stage(1)
    stage.fail(lost())
    assert stage.core.is_in_aborted_formation
    assert not stage.returned
    assert stage.has_given_up_steps
    assert "Follow" not in kinds(stage.rank.turn())


def test_the_loss_of_a_formation_that_was_left_is_not_caught() -> None:
    stage = Stage(0)
    with pytest.raises(PeerLostError):
        stage.fail(lost(formation=7))
    assert not stage.core.is_in_aborted_formation, "the joined one is whole"
    assert not stage.returned


def test_what_was_launched_in_a_lost_formation_is_over_when_it_is_left() -> None:
    """A follower may have launched steps whose end nobody waited for."""
    stage = Stage(1)
    stage.lose()
    stage.want("dp4", Carry.RESHARD)
    asked: list[tuple[Effect, Any]] = []
    do = stage.rank.loop._do

    def noted(effect: Effect) -> Any:
        asked.append((effect, stage.participant.binding))
        return do(effect)

    loop: Any = stage.rank.loop
    loop._do = noted
    stage.rank.turn(2)
    assert stage.has_given_up_steps
    joined_at = [binding for effect, binding in asked if isinstance(effect, ForgetSteps)]
    assert joined_at == [stage.binding], "until then it is joined, so the watchdog lets it out"
    (leave,) = (effect for effect, _ in asked if isinstance(effect, Leave))
    assert leave.group_lost


def test_a_follower_that_was_in_no_step_leaves_without_a_word_of_its_leader() -> None:
    stage = Stage(1)
    stage.want("dp4", Carry.RESHARD)
    assert "Leave" not in kinds(stage.rank.turn())
    stage.lose()
    stage.rank.turn()
    (leave,) = (each for each in stage.rank.turn() if isinstance(each, Leave))
    assert leave.group_lost
    assert stage.participant.binding is None
    assert not stage.core.is_in_aborted_formation


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_who_finds_no_room_calls_the_others_out_and_tells_of_it(rank: int) -> None:
    """Also one that is alone, rank 2: what its step left is not to be trusted."""
    stage = Stage(rank)
    assert (stage.oom_formation, stage.core.is_in_aborted_formation) == (0, False)
    stage.fail(no_room())
    assert (stage.oom_formation, stage.core.is_in_aborted_formation) == (1, True)
    ranks = (0, 1) if rank < 2 else (2,)
    assert stage.communicators.aborted == {(ranks, 1)}
    assert stage.returned == ([] if rank == 1 else RECOMPUTED)
    assert stage.leave(Carry.RESHARD, "tp4").group_lost
    assert (stage.oom_formation, stage.core.is_in_aborted_formation) == (1, False)
    for phase in (Phase.MOVE, Phase.SWAP):
        stage.rank.hear(stage.cell.wanted(phase, Carry.RESHARD, movers=()))
        stage.rank.turn()
        assert stage.oom_formation == 1, "it is reported until another formation serves"
    stage.rank.hear(stage.cell.wanted(Phase.SERVE, Carry.RESHARD))
    stage.rank.turn(2)
    assert stage.oom_formation == 0


def test_who_leaves_and_joins_before_it_reports_tells_that_it_had_no_room() -> None:
    """Its leader waits in the step, on CUDA until it hears that this rank is left out."""
    stage = Stage(1)
    stage.fail(no_room())
    before = len(stage.rank.reports)
    stage.want("dp4", Carry.RECOMPUTE)
    stage.rank.turn()
    assert kinds(stage.rank.turn())[:4] == ["ForgetSteps", "Follow", "Leave", "Join"]
    assert stage.participant.binding == stage.cell.target.bindings[1]
    assert {each.oom_formation for each in stage.rank.reports[before:]} == {1}


def test_who_is_in_no_group_does_not_come_out_of_one() -> None:
    stage = Stage(0)
    stage.leave(Carry.PAUSE, "off1+dp1+dp2")
    assert stage.participant.binding is None
    effect = stage.core.handle(Tick(), 1)
    assert effect is not None
    with pytest.raises(NoRoomError):
        stage.core.handle(StepFailed(no_room()), 1)


@pytest.mark.parametrize("carry", [Carry.RESHARD, Carry.PAUSE])
def test_leaving_an_aborted_group_is_leaving_a_lost_one(carry: Carry) -> None:
    """The rank that was lost may be back by the time that its leader hears of a new layout."""
    stage = Stage(0)
    stage.fail(lost())
    assert stage.leave(carry).group_lost
    assert not stage.participant.is_moving
    assert not stage.core.is_in_aborted_formation


def test_leaving_a_whole_group_is_not() -> None:
    assert not Stage(0).leave(Carry.RESHARD).group_lost


class FullQueue:
    """Has room at the given attempt."""

    def __init__(self, room_at: int) -> None:
        self.attempts = 0
        self._room_at = room_at

    def enqueue(self, _obj: Any, timeout: float | None = None) -> None:
        assert timeout is not None
        self.attempts += 1
        if self.attempts < self._room_at:
            raise TimeoutError

    def dequeue(self, timeout: float | None = None) -> Any:
        raise TimeoutError


def test_a_leader_waits_for_room_until_its_group_is_lost() -> None:
    queue, asked = FullQueue(room_at=9), []

    def is_lost() -> bool:
        asked.append(queue.attempts)
        return len(asked) == 3

    with pytest.raises(PeerLostError):
        send(queue, LeaveGroup(1, None), 30.0, is_lost)
    assert asked == [1, 2, 3]
    send(FullQueue(room_at=4), LeaveGroup(1, None), 30.0, lambda: False)


def test_a_leader_that_may_not_wait_tries_once() -> None:
    queue = FullQueue(room_at=2)
    with pytest.raises(TimeoutError):
        send(queue, LeaveGroup(1, None), 0.0, lambda: True)
    assert queue.attempts == 1
