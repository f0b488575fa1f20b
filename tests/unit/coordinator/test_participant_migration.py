"""The rank's side of a move of KV: what it keeps, what it goes on with, which groups it joins."""

import pytest

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive, Grant
from coordinator.protocol.switch_actions import Leave
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Carry, Phase, Stage
from tests.harness.coordinator.builders import directive, target
from tests.harness.coordinator.participants import (
    ALONE,
    MOVE,
    PAIR,
    PAIRED,
    PARK,
    SERVE,
    SWAP,
    left,
    make_moves,
    moved,
    obey,
    resolved,
    serving,
)


def test_tasks_move_only_if_their_group_left_with_that_plan() -> None:
    assert left().is_moving
    for carry in (Carry.PAUSE, Carry.DRAIN, Carry.RECOMPUTE):
        assert not left(carry).is_moving
    participant = serving(0, ALONE)
    participant.lease_until = -1
    assert obey(participant, directive(PAIRED, 2, PARK, carry=Carry.RESHARD)) == ["Leave"]
    assert not participant.is_moving, "its lease was over, so it may have been given up"


@pytest.mark.parametrize(
    ("carry", "for_move", "is_moving"),
    [
        (Carry.SPECULATE, False, False),
        (Carry.RESHARD, False, True),
        (Carry.PAUSE, True, False),
    ],
)
def test_a_follower_parks_for_a_move_with_its_leader(
    carry: Carry, for_move: bool, is_moving: bool
) -> None:
    participant = serving(1, target("tp2+dp2", 1))
    participant.on_directive(directive(target("tp4", 2), 2, PARK, carry=carry))
    participant.on_leave(1, for_move=for_move)
    participant.on_leave(1)
    assert make_moves(participant)[0] == "Leave"
    assert participant.is_moving is is_moving


def follower_left_for_a_move() -> SwitchParticipant:
    """It is to leave under SPECULATE; its leader has heard that all drained, and has left."""
    participant = serving(1, target("tp2+dp2", 1))
    assert obey(participant, directive(target("dp4", 2), 2, PARK, carry=Carry.SPECULATE)) == []
    participant.on_leave(1, for_move=True)
    participant.on_leave(1)
    return participant


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_follower_hears_of_a_move_before_it_leaves_for_it(epoch: int) -> None:
    participant = follower_left_for_a_move()
    assert make_moves(participant) == [], "its pages would stay out of the move"
    order = directive(target("dp4", epoch), epoch, PARK, carry=Carry.RESHARD)
    assert obey(participant, order)[0] == "Leave"
    assert participant.is_moving


def test_a_follower_hears_of_no_move_in_a_group_that_is_over() -> None:
    abandoned = directive(target("dp4", 2), 2, PARK, carry=Carry.SPECULATE, abandoned_formation=1)
    without_leader = directive(target("off1+dp3", 2), 2, PARK, carry=Carry.SPECULATE)
    for order in (abandoned, without_leader):
        participant = follower_left_for_a_move()
        assert obey(participant, order)[0] == "Leave"
        assert not participant.is_moving


def test_a_parked_rank_that_takes_no_part_only_acknowledges() -> None:
    participant = left()
    order = directive(PAIRED, 2, MOVE, carry=Carry.RESHARD, movers=[1])
    assert obey(participant, order) == ["Ack"]
    move = resolved(participant, directive(PAIRED, 2, SWAP, carry=Carry.RESHARD, moved=2))
    assert not move.is_committed


def test_a_committed_move_is_carried_out_before_its_group_is_joined() -> None:
    participant = moved()
    move = resolved(participant, directive(PAIRED, 2, SWAP, carry=Carry.RESHARD, moved=2))
    assert (move.epoch, move.is_committed, move.is_joined) == (2, True, True)
    assert not move.stays_parked
    assert not participant.is_moving
    assert make_moves(participant) == ["Join"]


@pytest.mark.parametrize("told", [0, 1])
def test_a_move_is_not_committed_by_an_older_one(told: int) -> None:
    move = resolved(moved(), directive(PAIRED, 2, SWAP, carry=Carry.RESHARD, moved=told))
    assert (move.is_committed, move.stays_parked) == (False, False)


def test_an_overtaken_rank_keeps_its_tasks_for_the_next_move() -> None:
    wide = target("tp4", 3)
    for participant in (left(), moved()):
        move = resolved(participant, directive(wide, 3, PARK, carry=Carry.RESHARD))
        assert (move.epoch, move.is_committed, move.stays_parked) == (2, False, True)
        assert participant.is_moving
        assert make_moves(participant) == ["Park"]
        order = directive(wide, 3, MOVE, carry=Carry.RESHARD)
        assert obey(participant, order) == ["Reshard"]
        assert resolved(participant, directive(wide, 3, SWAP, moved=3)).is_committed


@pytest.mark.parametrize(("phase", "carry"), [(PARK, Carry.PAUSE), (SWAP, Carry.RESHARD)])
def test_an_overtaken_rank_keeps_nothing_for_a_move_that_will_not_be(
    phase: Phase, carry: Carry
) -> None:
    participant = moved()
    move = resolved(participant, directive(target("tp4", 3), 3, phase, carry=carry))
    assert not move.stays_parked
    assert not participant.is_moving


def test_a_commit_that_was_overtaken_moves_on() -> None:
    participant = moved()
    order = directive(target("tp4", 3), 3, PARK, carry=Carry.RESHARD, moved=2)
    move = resolved(participant, order)
    assert (move.is_committed, move.stays_parked) == (True, True)
    assert participant.is_moving


def test_a_rank_tells_what_it_was_told_before_it_acts_on_it() -> None:
    participant = moved()
    assert participant.known_migration == (0, 2)
    participant.on_directive(directive(PAIRED, 2, SWAP, carry=Carry.RESHARD, moved=2))
    assert (participant.stage, participant.known_migration) == (Stage(2, MOVE), (2, 2))
    assert SwitchParticipant(Rank(0), 1).known_migration == (0, 0)


def granted() -> Directive:
    """A committed move whose groups begin at once."""
    grants = [Grant(binding.group.ranks, 5) for binding in PAIRED.bindings]
    return directive(PAIRED, 2, SERVE, carry=Carry.RESHARD, moved=2, grants=grants)


def test_groups_begin_behind_a_committed_move_without_another_round() -> None:
    for rank in PAIR:
        participant = moved(rank=rank)
        assert obey(participant, granted()) == ["Resolve", "Join", "Serve"]
        assert (participant.stage, participant.serving) == (Stage(2, SERVE), True)


def overtaken(participant: SwitchParticipant, *, moved: int = 2, **fields: object) -> Directive:
    """Tell the seat that other groups are wanted than those of its move."""
    order = directive(target("dp4", 3), 3, PARK, carry=Carry.RESHARD, moved=moved, **fields)  # type: ignore[arg-type]
    participant.on_directive(order)
    return order


def test_a_follower_joins_the_group_that_its_leader_may_be_in_a_step_of() -> None:
    participant = moved(rank=1)
    overtaken(participant)
    assert make_moves(participant) == ["Resolve", "Join"]
    assert participant.binding == PAIRED.bindings[0]
    assert (participant.stage, participant.target) == (Stage(2, SWAP), PAIRED), (
        "that is what it acknowledges"
    )
    assert not participant.is_moving
    assert make_moves(participant) == [], "its leader may be waiting for it"
    participant.on_leave(2)
    move = participant.next_move(idle=True)
    assert isinstance(move, Leave)
    assert (move.carry, move.group_lost) == (Carry.RESHARD, False)
    participant.made(move)
    assert (participant.stage, participant.is_moving) == (Stage(3, PARK), True)


def test_it_leaves_that_group_again_if_nobody_will_lead_it() -> None:
    participant = moved(rank=1)
    overtaken(participant)
    assert make_moves(participant) == ["Resolve", "Join"]
    overtaken(participant, abandoned_formation=2)
    assert make_moves(participant) == ["Leave"]


def test_a_leader_does_not_begin_what_is_not_wanted_any_more() -> None:
    participant = moved(rank=0)
    overtaken(participant)
    assert make_moves(participant) == ["Resolve", "Park"]
    assert participant.is_moving, "what it has taken over may be moved on"


def test_nobody_joins_what_was_not_committed() -> None:
    participant = moved(rank=1)
    overtaken(participant, moved=0)
    assert make_moves(participant) == ["Resolve", "Park"]


@pytest.mark.parametrize("changed", [{0: 2}, {1: 2}])
def test_nobody_joins_a_group_that_has_lost_a_process(changed: dict[int, int]) -> None:
    """Who is in a step with it is told of the loss, and gets out in another way."""
    participant = moved(rank=1)
    overtaken(participant, members=changed)
    assert make_moves(participant) == ["Resolve", "Park"]


def test_a_rank_drops_nothing_from_its_queues_until_it_hears_of_its_move() -> None:
    assert left(rank=1).may_drain
    assert not moved(rank=1).may_drain, "its leader may have heard, and have begun"
    participant = moved(rank=1)
    overtaken(participant, moved=0)
    make_moves(participant)
    assert participant.may_drain
    assert not serving(1, target("tp2+dp2", 1)).may_drain, "it reads what its leader sends"
