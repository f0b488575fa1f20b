"""When a rank's main loop counts as stuck."""

import pytest

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Stop
from coordinator.protocol.switch_participant import Joined, SwitchParticipant
from coordinator.protocol.terms import Carry, Phase, Target
from tests.harness.coordinator.builders import directive, target
from worker.launch.peer_failure import Loss, PeerFailure

TP2 = target("tp2+dp2", 1)
LIMIT_S = 1.0


def is_stuck(loss: PeerFailure, now_s: float) -> bool:
    """Look as the watchdog does."""
    loss.look(now_s)
    return loss.is_stuck(now_s)


def joined(rank: int, *, epoch: int = 1) -> SwitchParticipant:
    """A rank that serves in tp2+dp2."""
    participant = SwitchParticipant(Rank(rank), 1)
    for phase in (Phase.PARK, Phase.SWAP):
        participant.on_directive(directive(TP2, epoch, phase))
        while (move := participant.next_move(idle=True)) is not None:
            participant.made(move)
    assert participant.binding is not None
    return participant


def watched(rank: int) -> PeerFailure:
    loss = PeerFailure(joined(rank), LIMIT_S)
    loss.heard(directive(TP2, 1, Phase.SERVE))
    assert not is_stuck(loss, 0.0)
    return loss


def without(rank: int) -> Target:
    return target(f"{'off1+dp1' if rank == 0 else 'dp1+off1'}+dp2", 2)


def test_a_rank_whose_peer_is_cut_out_may_take_its_time_and_no_longer() -> None:
    loss = watched(0)
    loss.heard(directive(without(1), 2, Phase.PARK))
    assert not is_stuck(loss, 5.0)
    assert not is_stuck(loss, 5.0 + LIMIT_S)
    assert is_stuck(loss, 5.1 + LIMIT_S)


def test_what_a_rank_is_to_be_called_out_of_is_known_at_once() -> None:
    loss = watched(0)
    assert loss.degraded_binding() is None
    loss.heard(directive(without(1), 2, Phase.PARK))
    assert loss.degraded_binding() == TP2.binding_of(Rank(0))


def test_what_is_heard_is_answered_with_what_lacks_a_member() -> None:
    loss = PeerFailure(joined(0), LIMIT_S)
    assert loss.heard(directive(TP2, 1, Phase.SERVE)) is None
    assert loss.heard(directive(without(1), 2, Phase.PARK)) == TP2.binding_of(Rank(0))


def test_asking_whether_it_is_stuck_starts_no_clock() -> None:
    loss = watched(0)
    loss.heard(directive(without(1), 2, Phase.PARK))
    assert not loss.is_stuck(0.0)
    assert not loss.is_stuck(99.0), "nobody has looked"
    loss.look(99.0)
    assert not loss.is_stuck(99.0)
    assert loss.is_stuck(99.1 + LIMIT_S)


class LeavingParticipant:
    """Its rank leaves its group once somebody has read what it is joined to."""

    rank = Rank(0)

    def __init__(self) -> None:
        self.next: list[Joined | None] = []

    @property
    def joined(self) -> Joined | None:
        return self.next.pop(0) if self.next else None


def test_a_look_decides_by_one_reading_of_what_is_joined() -> None:
    participant = LeavingParticipant()
    loss = PeerFailure(participant, LIMIT_S)
    loss.heard(directive(without(1), 2, Phase.PARK))
    joined_then, binding = joined(0).joined, TP2.bindings[0]
    participant.next = [joined_then]
    assert loss.look(0.0) == Loss(binding, must_unblock=False)
    participant.next = [joined_then]
    assert loss.look(1.0) == Loss(binding, must_unblock=True), "as of the reading"
    assert loss.degraded_binding() is None, "it has left by now"
    assert loss.look(2.0) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_a_peer_whose_process_has_ended(rank: int) -> None:
    """Its step never ends, while that of a peer that is only slow may."""
    loss, peer = watched(rank), 1 - rank
    loss.heard(directive(without(peer), 2, Phase.PARK))
    binding = TP2.bindings[0]
    assert loss.look(0.0) == Loss(binding, must_unblock=False), "it may be slow"
    loss.heard(directive(without(peer), 2, Phase.PARK, ended=[peer]))
    assert loss.look(0.0) == Loss(binding, must_unblock=True)


def test_nobody_waits_for_a_peer_that_another_process_has_replaced() -> None:
    loss = watched(1)
    loss.heard(directive(TP2, 2, Phase.PARK, members={0: 2}))
    assert loss.look(0.0) == Loss(TP2.bindings[0], must_unblock=True)


def test_a_rank_that_was_lost_itself_is_not_called_out_as_its_peer_has_ended() -> None:
    loss = watched(0)
    loss.heard(directive(target("off2+dp2", 2), 2, Phase.PARK, ended=[1]))
    assert loss.look(0.0) == Loss(TP2.bindings[0], must_unblock=False)


def test_ends_in_other_groups_change_no_grace() -> None:
    loss = watched(0)
    loss.heard(directive(target("dp1+off1+dp1+off1", 2), 2, Phase.PARK, ended=[3]))
    assert loss.look(0.0) == Loss(TP2.bindings[0], must_unblock=False)


def test_a_peer_that_is_a_new_process_is_lost() -> None:
    loss = watched(1)
    loss.heard(directive(TP2, 2, Phase.PARK, members={0: 2}))
    assert not is_stuck(loss, 0.0)
    assert is_stuck(loss, 2.0)


def test_a_rank_that_leaves_in_time_is_not_stuck() -> None:
    participant = joined(0)
    loss = PeerFailure(participant, LIMIT_S)
    told = directive(without(1), 2, Phase.PARK, carry=Carry.RECOMPUTE)
    loss.heard(told)
    assert not is_stuck(loss, 0.0)
    participant.on_directive(told)
    while (move := participant.next_move(idle=True)) is not None:
        participant.made(move)
    assert not is_stuck(loss, 9.0)
    assert not is_stuck(loss, 99.0)


def test_ranks_of_other_groups_do_not_matter() -> None:
    loss = watched(0)
    loss.heard(directive(target("tp2+dp1+off1", 1), 2, Phase.PARK))
    assert not is_stuck(loss, 0.0)
    assert not is_stuck(loss, 99.0)


def test_a_rank_that_is_cut_out_itself_is_not_stuck() -> None:
    loss = PeerFailure(joined(2), LIMIT_S)
    loss.heard(directive(target("tp2+off1+dp1", 1), 2, Phase.PARK))
    assert not is_stuck(loss, 0.0)
    assert not is_stuck(loss, 99.0)


def test_what_says_nothing_of_members_is_not_heeded() -> None:
    loss = watched(0)
    loss.heard(Stop("end"))
    assert not is_stuck(loss, 99.0)


def test_a_rank_that_was_cut_out_of_its_group_leaves_it_too() -> None:
    loss = watched(0)
    loss.heard(directive(without(0), 2, Phase.PARK))
    assert not is_stuck(loss, 0.0)
    assert is_stuck(loss, 0.1 + LIMIT_S)


def test_a_rank_alone_that_was_cut_out_may_finish_its_step() -> None:
    loss = PeerFailure(joined(2), LIMIT_S)
    loss.heard(directive(target("tp2+off1+dp1", 2), 2, Phase.PARK))
    assert not is_stuck(loss, 0.0)
    assert not is_stuck(loss, 99.0)


def test_what_is_joined_is_told_with_its_members_and_ends_with_the_leave() -> None:
    participant = joined(1)
    assert participant.joined == (TP2.binding_of(Rank(1)), {0: 1, 1: 1})
    participant.on_leave(1)
    participant.on_directive(directive(target("dp4", 2), 2, Phase.PARK, carry=Carry.RESHARD))
    move = participant.next_move(idle=True)
    assert move is not None
    participant.made(move)
    assert participant.joined is None


def test_a_rank_may_be_stuck_in_the_last_step_of_a_group_that_it_has_left() -> None:
    participant = joined(0)
    assert participant.joined is not None
    draining = [participant.joined]
    told = directive(target("dp4", 2), 2, Phase.PARK, carry=Carry.PAUSE)
    participant.on_directive(told)
    move = participant.next_move(idle=True)
    assert move is not None
    participant.made(move)
    loss = PeerFailure(participant, LIMIT_S, lambda: tuple(draining))
    loss.heard(told)
    assert loss.degraded_binding() is None, "all of its members are there"
    loss.heard(directive(without(1), 3, Phase.PARK))
    assert loss.degraded_binding() == TP2.binding_of(Rank(0))
    assert not is_stuck(loss, 0.0)
    assert is_stuck(loss, 2.0)
    loss.heard(directive(target("dp4", 4), 4, Phase.PARK))
    assert is_stuck(loss, 2.1), "the step does not end because the lost rank is back"
    draining.clear()
    assert not is_stuck(loss, 2.2), "the step came to its end"


def test_a_slow_member_of_the_joined_group_may_come_back() -> None:
    loss = watched(0)
    loss.heard(directive(without(1), 2, Phase.PARK))
    assert not is_stuck(loss, 0.1)
    loss.heard(directive(TP2, 3, Phase.PARK))
    assert not is_stuck(loss, 9.0)
