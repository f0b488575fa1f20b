"""The rank's side of the switch protocol, one situation per test; the simulation mixes them."""

import pytest

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Grant, LeaseRetention
from coordinator.protocol.switch_actions import Ack, Join, Leave, Park, Serve
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.switch_rules import IllegalEventError
from coordinator.protocol.terms import Carry, Stage, Target
from tests.harness.coordinator.builders import LEASE_MS, directive, target
from tests.harness.coordinator.participants import (
    PAIR,
    PARK,
    SERVE,
    SWAP,
    make_moves,
    obey,
    serving,
)


def test_a_rank_parks_joins_and_serves() -> None:
    participant = SwitchParticipant(Rank(1), 1)
    pair = target("tp2+dp2", 1)
    assert participant.next_move(idle=True) is None
    assert obey(participant, directive(pair, 1, PARK, carry=Carry.RESHARD)) == ["Park"]
    assert (participant.stage, participant.binding) == (Stage(1, PARK), None)
    assert obey(participant, directive(pair, 1, SWAP)) == ["Join"]
    assert participant.binding == pair.bindings[0]
    assert participant.is_follower
    assert not participant.is_leader
    kept = LeaseRetention(PAIR, 3, (2,))
    participant.on_directive(directive(pair, 1, SERVE, grants=[Grant(PAIR, 7)], retentions=[kept]))
    move = participant.next_move(idle=True)
    assert isinstance(move, Serve)
    assert (move.binding, move.grant_pages, move.retention) == (pair.bindings[0], 7, kept)
    participant.made(move)
    assert (participant.stage, participant.serving, participant.target) == (
        Stage(1, SERVE),
        True,
        pair,
    )


def test_serve_has_the_grant_of_its_group() -> None:
    participant = SwitchParticipant(Rank(0), 1)
    pair = target("tp2+dp2", 1)
    obey(participant, directive(pair, 1, SWAP))
    with pytest.raises(IllegalEventError, match="grants no pages to tp2"):
        obey(participant, directive(pair, 1, SERVE, grants=[Grant((Rank(2),), 7)]))
    assert participant.stage == Stage(1, SWAP)


def test_a_rank_that_missed_stages_catches_up() -> None:
    participant = SwitchParticipant(Rank(0), 1)
    pair = target("tp2+dp2", 4)
    assert obey(participant, directive(pair, 4, SERVE, grants=[Grant(PAIR, 1)])) == [
        "Join",
        "Serve",
    ]


def test_late_directives_change_nothing() -> None:
    participant = serving(0, target("dp4", 3), epoch=3)
    for epoch, phase in ((1, SERVE), (2, PARK), (3, PARK), (3, SWAP)):
        assert obey(participant, directive(target("tp4", epoch), epoch, phase)) == []
    assert participant.stage == Stage(3, SERVE)


def test_a_directive_for_another_incarnation_is_not_heard() -> None:
    participant = SwitchParticipant(Rank(0), 2)
    participant.on_directive(directive(target("dp4", 1), 1, PARK, incarnation=1))
    assert participant.wanted is None
    assert participant.lease_until < 0


def test_only_a_serving_leader_with_a_lease_may_step() -> None:
    pair = target("tp2+dp2", 1)
    leader, follower = serving(0, pair), serving(1, pair)
    assert leader.may_step(LEASE_MS - 1)
    assert not leader.may_step(LEASE_MS)
    assert not follower.may_step(0)
    assert not SwitchParticipant(Rank(0), 1).may_step(0)


def test_an_unaffected_group_adopts_the_epoch_and_goes_on() -> None:
    participant = serving(2, target("tp2+dp2", 1))
    changed = target("dp4", 2, 2, 1, 1)
    assert obey(participant, directive(changed, 2, PARK)) == ["Ack"]
    assert participant.may_step(0)
    assert obey(participant, directive(changed, 2, SERVE)) == ["Ack"]
    assert (participant.stage, participant.target) == (Stage(2, SERVE), changed)


def test_a_group_that_comes_back_in_the_same_shape_is_another_formation() -> None:
    participant = serving(0, target("dp4", 1))
    assert obey(participant, directive(target("dp4", 3), 3, SWAP)) == ["Leave", "Join"]


def test_a_leader_leaves_at_its_safe_point_and_parks() -> None:
    pair = target("tp2+dp2", 1)
    participant = serving(0, pair)
    participant.on_directive(directive(target("dp4", 2), 2, PARK, carry=Carry.PAUSE))
    move = participant.next_move(idle=False)
    assert isinstance(move, Leave)
    assert (move.binding, move.carry) == (pair.bindings[0], Carry.PAUSE)
    assert (move.is_leader, move.group_lost) == (True, False)
    participant.made(move)
    assert (participant.binding, participant.serving, participant.stage) == (
        None,
        False,
        Stage(2, PARK),
    )


def test_a_draining_leader_leaves_when_idle_or_told_otherwise() -> None:
    participant = serving(0, target("tp2+dp2", 1))
    apart = target("dp4", 2)
    assert obey(participant, directive(apart, 2, PARK, carry=Carry.DRAIN), idle=False) == []
    assert participant.may_step(0)
    assert isinstance(participant.next_move(idle=True), Leave)
    assert obey(participant, directive(apart, 2, PARK, carry=Carry.RECOMPUTE), idle=False) == [
        "Leave",
        "Join",
    ]


@pytest.mark.parametrize(
    ("carry", "idle", "done"),
    [
        (Carry.DRAIN, False, Carry.RECOMPUTE),
        (Carry.DRAIN, True, Carry.DRAIN),
        (Carry.SPECULATE, False, Carry.RECOMPUTE),
    ],
)
def test_a_leader_that_never_served_waits_for_no_task(
    carry: Carry, idle: bool, done: Carry
) -> None:
    # It took paused tasks up when it joined, and another layout was wanted before it could step.
    participant = SwitchParticipant(Rank(0), 1)
    assert "Join" in obey(participant, directive(target("dp4", 1), 1, SWAP))
    assert not participant.may_step(0)
    participant.on_directive(directive(target("tp2+dp2", 2), 2, PARK, carry=carry))
    move = participant.next_move(idle=idle)
    assert isinstance(move, Leave)
    assert move.carry is done


@pytest.mark.parametrize("idle", [False, True])
def test_a_leader_serves_on_while_a_switch_waits_for_stragglers(idle: bool) -> None:
    participant = serving(0, target("tp2+dp2", 1))
    apart = target("dp4", 2)
    assert obey(participant, directive(apart, 2, PARK, carry=Carry.SPECULATE), idle=idle) == []
    assert participant.may_step(0)
    assert obey(participant, directive(apart, 2, PARK, carry=Carry.RESHARD), idle=idle) == ["Leave"]
    assert participant.is_moving


def test_a_group_that_lost_a_follower_waits_for_no_stragglers() -> None:
    participant = serving(0, target("tp2+dp2", 1))
    participant.on_directive(directive(target("dp1+off1+dp2", 2), 2, PARK, carry=Carry.SPECULATE))
    move = participant.next_move(idle=False)
    assert isinstance(move, Leave)
    assert move.group_lost


def test_a_follower_leaves_only_after_its_leader() -> None:
    participant = serving(1, target("tp2+dp2", 1))
    assert obey(participant, directive(target("dp4", 2), 2, PARK)) == []
    participant.on_leave(0)
    assert make_moves(participant) == [], "an older formation's leave is not this one's"
    participant.on_leave(1)
    assert make_moves(participant) == ["Leave", "Join"]


def test_a_leave_heard_before_its_directive_is_remembered() -> None:
    participant = serving(1, target("tp2+dp2", 1))
    participant.on_leave(1)
    assert make_moves(participant) == []
    assert obey(participant, directive(target("dp4", 2), 2, PARK)) == ["Leave", "Join"]


def test_a_leave_heard_while_parked_frees_a_late_joiner() -> None:
    participant = SwitchParticipant(Rank(1), 1)
    pair = target("tp2+dp2", 5)
    obey(participant, directive(pair, 5, PARK, carry=Carry.RESHARD))
    participant.on_leave(5)
    assert obey(participant, directive(pair, 5, SWAP)) == ["Join"]
    assert obey(participant, directive(target("dp4", 6), 6, PARK)) == ["Leave", "Join"]


@pytest.mark.parametrize(
    ("layout", "members"),
    [("off1+dp3", {}), ("dp4", {0: 2})],
    ids=["cut out", "restarted"],
)
def test_a_follower_whose_leader_is_gone_waits_for_nobody(
    layout: str, members: dict[int, int]
) -> None:
    participant = serving(1, target("tp2+dp2", 1))
    participant.on_directive(directive(target(layout, 2), 2, PARK, members=members))
    move = participant.next_move(idle=True)
    assert isinstance(move, Leave)
    assert move.group_lost


def test_a_group_that_lost_a_follower_does_not_drain() -> None:
    participant = serving(0, target("tp2+dp2", 1))
    participant.on_directive(directive(target("dp1+off1+dp2", 2), 2, PARK, carry=Carry.DRAIN))
    move = participant.next_move(idle=False)
    assert isinstance(move, Leave)
    assert move.group_lost


def test_a_rank_that_is_cut_out_leaves_and_acknowledges() -> None:
    participant = serving(0, target("tp2+dp2", 1))
    without = target("off1+dp3", 2)
    assert obey(participant, directive(without, 2, PARK)) == ["Leave"]
    assert obey(participant, directive(without, 2, SERVE)) == ["Ack"]
    assert obey(participant, directive(target("off1+dp1+tp2", 3), 3, SWAP)) == ["Park", "Ack"]


def test_a_follower_does_not_wait_for_a_leader_that_will_not_come() -> None:
    participant = SwitchParticipant(Rank(1), 1)
    assert obey(participant, directive(target("tp2+dp2", 5), 5, PARK)) == ["Join"]
    apart = target("dp4", 6)
    assert obey(participant, directive(apart, 6, PARK)) == []
    assert obey(participant, directive(apart, 6, PARK, abandoned_formation=4)) == [], (
        "that was another formation"
    )
    assert obey(participant, directive(apart, 6, PARK, abandoned_formation=5)) == ["Leave", "Join"]


def test_where_nothing_moves_the_next_group_is_joined_at_once() -> None:
    participant = serving(0, target("dp4", 1))
    pair = target("tp2+dp2", 2)
    assert obey(participant, directive(pair, 2, PARK, carry=Carry.PAUSE)) == ["Leave", "Join"]
    assert (participant.binding, participant.stage) == (pair.bindings[0], Stage(2, SWAP))
    assert not participant.may_step(0)
    assert obey(participant, directive(pair, 2, SWAP, carry=Carry.PAUSE)) == []
    order = directive(pair, 2, SERVE, grants=[Grant((Rank(0), Rank(1)), 3)])
    assert obey(participant, order) == ["Serve"]
    assert participant.may_step(0)


@pytest.mark.parametrize("carry", [Carry.RESHARD, Carry.SPECULATE])
def test_where_something_may_move_nothing_is_joined_before(carry: Carry) -> None:
    participant = SwitchParticipant(Rank(0), 1)
    assert obey(participant, directive(target("tp2+dp2", 2), 2, PARK, carry=carry)) == ["Park"]
    assert participant.binding is None


def test_a_lapsed_lease_is_not_renewed_by_a_coordinator_that_knows_nothing() -> None:
    participant = serving(0, target("tp2+dp2", 1))
    nothing = Target(())
    participant.on_directive(directive(nothing, 0, PARK, answers_ms=LEASE_MS - 1))
    assert participant.may_step(LEASE_MS), "the report was sent within the lease"
    lapsed_ms = 5 * LEASE_MS
    participant.on_directive(directive(nothing, 0, PARK, answers_ms=lapsed_ms))
    assert not participant.may_step(lapsed_ms), "its followers may be gone"


def test_a_lapsed_lease_is_renewed_by_a_target_with_the_same_formation() -> None:
    participant = serving(0, target("tp2+dp2", 1))
    lapsed_ms = 5 * LEASE_MS
    obey(participant, directive(target("tp2+tp2", 1, 2), 2, PARK, answers_ms=lapsed_ms))
    assert participant.may_step(lapsed_ms)


def test_a_leader_whose_lease_lapsed_cannot_drain() -> None:
    # It may have been cut out and taken in again between two directives that it heard.
    participant = serving(0, target("tp2+dp2", 1))
    order = directive(target("dp4", 4), 4, PARK, carry=Carry.DRAIN, answers_ms=5 * LEASE_MS)
    participant.on_directive(order)
    assert not participant.may_step(5 * LEASE_MS)
    move = participant.next_move(idle=False)
    assert isinstance(move, Leave)
    assert move.group_lost


def test_another_layout_of_an_acknowledged_epoch_is_not_obeyed() -> None:
    participant = SwitchParticipant(Rank(0), 1)
    obey(participant, directive(target("tp2+dp2", 5), 5, PARK, carry=Carry.RESHARD))
    assert obey(participant, directive(target("dp4", 5), 5, SWAP)) == []
    assert obey(participant, directive(target("dp4", 6), 6, SWAP)) == ["Join"]


def test_moves_say_which_directive_they_obey() -> None:
    participant = SwitchParticipant(Rank(0), 1)
    first = directive(target("dp4", 1), 1, PARK, carry=Carry.RESHARD)
    participant.on_directive(first)
    move = participant.next_move(idle=True)
    assert move == Park(first)
    participant.on_directive(directive(target("dp4", 1), 1, SWAP))
    participant.made(move)
    assert participant.stage == Stage(1, PARK)
    assert isinstance(participant.next_move(idle=True), Join)


def wanted_carry(participant: SwitchParticipant) -> Carry:
    assert participant.wanted is not None
    return participant.wanted.carry


def test_the_refreshed_directive_of_a_stage_counts() -> None:
    participant = SwitchParticipant(Rank(0), 1)
    wanted = target("dp4", 1)
    participant.on_directive(directive(wanted, 1, PARK, answers_ms=20, carry=Carry.DRAIN))
    participant.on_directive(directive(wanted, 1, PARK, answers_ms=10, carry=Carry.PAUSE))
    assert wanted_carry(participant) is Carry.DRAIN
    participant.on_directive(directive(wanted, 1, PARK, answers_ms=30, carry=Carry.PAUSE))
    assert wanted_carry(participant) is Carry.PAUSE


def test_ack_names_its_stage() -> None:
    participant = serving(2, target("tp2+dp2", 1))
    participant.on_directive(directive(target("dp4", 2, 2, 1, 1), 2, SWAP))
    move = participant.next_move(idle=False)
    assert isinstance(move, Ack)
    assert move.stage == Stage(2, SWAP)
