"""What a rank does in a group that has lost a member: the step does not count, nobody waits."""

from types import SimpleNamespace
from typing import Any

import pytest

from comm_pool.formations import PeerLostError
from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Grant
from coordinator.protocol.switch_actions import Join, Leave
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Carry, Phase, ReturnCause
from tests.harness.coordinator.builders import directive, target
from worker.io.step_queue import LeaveGroup, send
from worker.rank.engine import NoRoomError
from worker.rank.formation_abort import FormationAbort

TP2 = target("tp2+dp2", 1)
NAMES = ["a", "b"]


class Communicators:
    def __init__(self) -> None:
        self.aborted: set[tuple[tuple[Rank, ...], int]] = set()

    def abort(self, ranks: tuple[Rank, ...], formation: int) -> None:
        self.aborted.add((ranks, formation))

    def is_aborted(self, ranks: tuple[Rank, ...], formation: int) -> bool:
        return (ranks, formation) in self.aborted


class FakeMember:
    """Only what is done to it."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(communicators=Communicators())
        self.forgotten = 0
        self.dropped: list[int] = []
        self.steps = SimpleNamespace(drop=self.dropped.append)
        self.given_up: list[tuple[list[str], ReturnCause]] = []

    def mode_of(self, _group: Any) -> Any:
        return SimpleNamespace(
            scheduler=SimpleNamespace(requests=dict.fromkeys(NAMES)), forget_steps=self._forget
        )

    def _forget(self) -> None:
        self.forgotten += 1

    def give_up(self, _group: Any, tasks: list[str], cause: ReturnCause) -> None:
        self.given_up.append((tasks, cause))


class Stage:
    """A rank that serves in tp2+dp2."""

    def __init__(self, rank: int) -> None:
        self.participant = SwitchParticipant(Rank(rank), 1)
        self.runtime = FakeMember()
        for phase in (Phase.PARK, Phase.SWAP):
            self.participant.on_directive(directive(TP2, 1, phase))
            while (move := self.participant.next_move(idle=True)) is not None:
                self.participant.made(move)
        self.lost = FormationAbort(self.participant, self.runtime)  # type: ignore[arg-type]

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
    assert not stage.runtime.given_up


def test_a_leader_gives_its_tasks_back_and_tells_the_others() -> None:
    stage = Stage(0)
    assert stage.lost.guarded(stage.fail) is None
    assert stage.lost.is_joined
    assert stage.runtime.given_up == [(NAMES, ReturnCause.RECOMPUTE)]
    assert (stage.runtime.forgotten, stage.runtime.dropped) == (1, [1])


def test_a_follower_has_no_tasks_to_give_back() -> None:
    stage = Stage(1)
    assert stage.lost.guarded(stage.fail) is None
    assert stage.lost.is_joined
    assert not stage.runtime.given_up
    assert stage.runtime.forgotten == 1


def test_the_loss_of_a_formation_that_was_left_is_not_caught() -> None:
    stage = Stage(0)
    with pytest.raises(PeerLostError):
        stage.lost.guarded(lambda: stage.fail(formation=7))
    assert not stage.lost.is_joined, "the joined one is whole"
    assert not stage.runtime.given_up
    stage.participant.made(stage.leave(Carry.PAUSE))
    with pytest.raises(PeerLostError):
        stage.lost.guarded(stage.fail)


def test_what_was_launched_in_a_lost_formation_is_over_when_it_is_left() -> None:
    """A follower may have launched steps whose end nobody waited for."""
    stage = Stage(1)
    binding = stage.participant.binding
    assert binding is not None
    stage.runtime.engine.communicators.abort(binding.group.ranks, binding.formation)
    move = stage.leave(Carry.RESHARD)
    assert isinstance(move, Leave)
    assert move.group_lost
    assert stage.runtime.dropped == [1]
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
    stage.runtime.engine.communicators.abort(binding.group.ranks, binding.formation)
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
    assert stage.runtime.engine.communicators.aborted == {(ranks, 1)}
    assert stage.runtime.given_up == ([] if rank == 1 else [(NAMES, ReturnCause.RECOMPUTE)])
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
