"""What a rank does in a group that has lost a member: the step does not count, nobody waits."""

from typing import Any

import pytest

from comm_pool.formations import PeerLostError
from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Grant
from coordinator.protocol.switch_actions import Join, Leave
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Carry, Phase, ReturnCause
from tests.harness.coordinator.builders import directive, target
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_rank import FakeRank
from worker.io.step_queue import LeaveGroup, send
from worker.rank.engine import NoRoomError
from worker.rank.formation_abort import FormationAbort

TP2 = target("tp2+dp2", 1)
NAMES = ["a", "b"]
RECOMPUTED = [(name, ReturnCause.RECOMPUTE) for name in NAMES]


class Stage:
    """A rank that serves in tp2+dp2; leaders have tasks that run, and a last step is deferred."""

    def __init__(self, rank: int) -> None:
        self.participant = SwitchParticipant(Rank(rank), 1)
        for phase in (Phase.PARK, Phase.SWAP):
            self.participant.on_directive(directive(TP2, 1, phase))
            while (move := self.participant.next_move(idle=True)) is not None:
                self.participant.made(move)
        cell = FakeCell(4)
        binding = self.participant.binding
        assert binding is not None
        members = [FakeRank(cell, each) for each in binding.group.ranks]
        leader = members[0]
        self.rank = next(each for each in members if each.engine.spec.rank == rank)
        for each in members:
            each.runtime.join(binding)
        leader.runtime.serve(binding, (), 8)
        for name in NAMES:
            leader.place(name, binding)
        leader.step()
        leader.runtime.defer_step(1)
        while self.rank is not leader and self.rank.runtime.follow(binding, wait_s=0.0):
            pass
        self.steps, self.mode = self.rank.runtime.steps, self.rank.engine.of_width(len(members))
        self.communicators = self.rank.engine.communicators
        assert (self.has_given_up_steps, self.returned) == (False, [])
        self.lost = FormationAbort(self.participant, self.rank.runtime)

    @property
    def has_given_up_steps(self) -> bool:
        """Whether neither the rank nor its runner knows of the last step and its tasks."""
        assert self.steps.has_deferred_step == bool(self.mode.known)
        return not self.steps.has_deferred_step

    @property
    def returned(self) -> list[tuple[str, ReturnCause]]:
        """The tasks that go back to the coordinator."""
        return [(each.task, each.cause) for each in self.rank.runtime.returned]

    def fail(self, formation: int = 1) -> None:
        raise PeerLostError(formation)

    def run_out(self) -> None:
        raise NoRoomError("CUDA out of memory.")

    def obey(self, phase: Phase) -> None:
        """Do what is to be done in dp4."""
        dp4 = target("dp4", 2)
        grants = [Grant(binding.group.ranks, 8) for binding in dp4.bindings]
        self.participant.on_directive(directive(dp4, 2, phase, grants=grants))
        while (move := self.participant.next_move(idle=True)) is not None:
            self.participant.made(move)

    def leave(self, carry: Carry) -> Any:
        self.participant.on_leave(1)
        self.participant.on_directive(directive(target("dp4", 2), 2, Phase.PARK, carry=carry))
        return self.lost.check(self.participant.next_move(idle=False))


def test_a_step_that_succeeds_is_left_alone() -> None:
    stage = Stage(0)
    assert stage.lost.guarded(lambda: 7) == 7
    assert not stage.lost.is_joined
    assert not stage.returned
    assert not stage.has_given_up_steps


def test_a_leader_gives_its_tasks_back_and_tells_the_others() -> None:
    stage = Stage(0)
    assert stage.lost.guarded(stage.fail) is None
    assert stage.lost.is_joined
    assert stage.returned == RECOMPUTED
    assert stage.has_given_up_steps


def test_a_follower_has_no_tasks_to_give_back() -> None:
    stage = Stage(1)
    assert stage.lost.guarded(stage.fail) is None
    assert stage.lost.is_joined
    assert not stage.returned
    assert stage.has_given_up_steps


def test_the_loss_of_a_formation_that_was_left_is_not_caught() -> None:
    stage = Stage(0)
    with pytest.raises(PeerLostError):
        stage.lost.guarded(lambda: stage.fail(formation=7))
    assert not stage.lost.is_joined, "the joined one is whole"
    assert not stage.returned
    stage.participant.made(stage.leave(Carry.PAUSE))
    with pytest.raises(PeerLostError):
        stage.lost.guarded(stage.fail)


def test_what_was_launched_in_a_lost_formation_is_over_when_it_is_left() -> None:
    """A follower may have launched steps whose end nobody waited for."""
    stage = Stage(1)
    binding = stage.participant.binding
    assert binding is not None
    stage.communicators.abort(binding.group.ranks, binding.formation)
    move = stage.leave(Carry.RESHARD)
    assert isinstance(move, Leave)
    assert move.group_lost
    assert stage.has_given_up_steps
    assert stage.participant.binding == binding, (
        "until then it is joined, so the watchdog lets it out"
    )


def test_a_follower_that_was_in_no_step_leaves_without_a_word_of_its_leader() -> None:
    stage = Stage(1)
    assert not stage.lost.is_noticed()
    stage.participant.on_directive(directive(target("dp4", 2), 2, Phase.PARK, carry=Carry.RESHARD))
    assert stage.participant.next_move(idle=True) is None
    binding = stage.participant.binding
    assert binding is not None
    stage.communicators.abort(binding.group.ranks, binding.formation)
    assert stage.lost.is_noticed()
    move = stage.lost.check(stage.participant.next_move(idle=True))
    assert isinstance(move, Leave)
    assert move.group_lost
    stage.participant.made(move)
    assert not stage.lost.is_noticed()


def has_news(stage: Stage) -> bool:
    return stage.lost.has_news


def told(stage: Stage) -> tuple[int, bool]:
    """The formation in which there was no room, and whether the rank is still in a lost one."""
    return stage.lost.oom_formation, stage.lost.is_joined


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_who_finds_no_room_calls_the_others_out_and_tells_of_it(rank: int) -> None:
    """Also one that is alone, rank 2: what its step left is not to be trusted."""
    stage = Stage(rank)
    assert told(stage) == (0, False)
    assert stage.lost.guarded(stage.run_out) is None
    assert told(stage) == (1, True)
    assert stage.lost.is_noticed()
    ranks = (0, 1) if rank < 2 else (2,)
    assert stage.communicators.aborted == {(ranks, 1)}
    assert stage.returned == ([] if rank == 1 else RECOMPUTED)
    move = stage.leave(Carry.RESHARD)
    assert isinstance(move, Leave)
    assert move.group_lost
    stage.participant.made(move)
    assert told(stage) == (1, False)
    stage.obey(Phase.SWAP)
    assert told(stage) == (1, False), "it is told until another formation serves"
    stage.obey(Phase.SERVE)
    assert told(stage) == (0, False)


def test_who_leaves_and_joins_before_it_reports_tells_that_it_had_no_room() -> None:
    """Its leader waits in the step, on CUDA until it hears that this rank is left out."""
    stage = Stage(1)
    stage.lost.guarded(stage.run_out)
    assert has_news(stage), "a report of it is sent at once"
    stage.lost.is_noticed()
    stage.participant.on_directive(
        directive(target("dp4", 2), 2, Phase.PARK, carry=Carry.RECOMPUTE)
    )
    moves = []
    while (move := stage.lost.check(stage.participant.next_move(idle=True))) is not None:
        stage.participant.made(move)
        moves.append(type(move))
    assert moves == [Leave, Join]
    assert has_news(stage)
    assert stage.lost.tell() == 1
    assert not has_news(stage), "it goes on to be told, but not at once"
    assert stage.lost.tell() == 1


def test_who_is_in_no_group_does_not_come_out_of_one() -> None:
    stage = Stage(0)
    stage.participant.made(stage.leave(Carry.PAUSE))
    with pytest.raises(NoRoomError):
        stage.lost.guarded(stage.run_out)


def test_what_else_goes_wrong_is_not_caught() -> None:
    with pytest.raises(ZeroDivisionError):
        Stage(0).lost.guarded(lambda: 1 // 0)


@pytest.mark.parametrize("carry", [Carry.RESHARD, Carry.PAUSE])
def test_leaving_an_aborted_group_is_leaving_a_lost_one(carry: Carry) -> None:
    """The rank that was lost may be back by the time that its leader hears of a new layout."""
    stage = Stage(0)
    stage.lost.guarded(stage.fail)
    move = stage.leave(carry)
    assert isinstance(move, Leave)
    assert move.group_lost
    stage.participant.made(move)
    assert not stage.participant.is_moving
    assert not stage.lost.is_joined


def test_leaving_a_whole_group_is_not() -> None:
    move = Stage(0).leave(Carry.RESHARD)
    assert isinstance(move, Leave)
    assert not move.group_lost


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
