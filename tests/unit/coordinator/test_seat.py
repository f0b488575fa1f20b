"""The rank's side of the switch protocol, one situation per test; the simulation mixes them."""

import pytest

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Grant, LeaseRetention
from coordinator.protocol.switch_actions import Ack, Join, Leave, Park, Serve
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Carry, Stage, Target
from tests.harness.coordinator.builders import LEASE_MS, directive, target
from tests.harness.coordinator.seats import PAIR, PARK, SERVE, SWAP, make_moves, obey, serving


def test_a_rank_parks_joins_and_serves() -> None:
    seat = SwitchParticipant(Rank(1), 1)
    pair = target("tp2+dp2", 1)
    assert seat.next_move(idle=True) is None
    assert obey(seat, directive(pair, 1, PARK, carry=Carry.RESHARD)) == ["Park"]
    assert (seat.stage, seat.binding) == (Stage(1, PARK), None)
    assert obey(seat, directive(pair, 1, SWAP)) == ["Join"]
    assert seat.binding == pair.bindings[0]
    assert seat.is_follower
    assert not seat.is_leader
    kept = LeaseRetention(PAIR, 3, (2,))
    seat.on_directive(directive(pair, 1, SERVE, grants=[Grant(PAIR, 7)], kept=[kept]))
    move = seat.next_move(idle=True)
    assert isinstance(move, Serve)
    assert (move.binding, move.grant_pages, move.kept) == (pair.bindings[0], 7, kept)
    seat.made(move)
    assert (seat.stage, seat.serving, seat.target) == (Stage(1, SERVE), True, pair)


def test_serve_waits_for_the_grant_of_its_group() -> None:
    seat = SwitchParticipant(Rank(0), 1)
    pair = target("tp2+dp2", 1)
    obey(seat, directive(pair, 1, SWAP))
    assert obey(seat, directive(pair, 1, SERVE, grants=[Grant((Rank(2),), 7)])) == []


def test_a_rank_that_missed_stages_catches_up() -> None:
    seat = SwitchParticipant(Rank(0), 1)
    pair = target("tp2+dp2", 4)
    assert obey(seat, directive(pair, 4, SERVE, grants=[Grant(PAIR, 1)])) == ["Join", "Serve"]


def test_late_directives_change_nothing() -> None:
    seat = serving(0, target("dp4", 3), epoch=3)
    for epoch, phase in ((1, SERVE), (2, PARK), (3, PARK), (3, SWAP)):
        assert obey(seat, directive(target("tp4", epoch), epoch, phase)) == []
    assert seat.stage == Stage(3, SERVE)


def test_a_directive_for_another_incarnation_is_not_heard() -> None:
    seat = SwitchParticipant(Rank(0), 2)
    seat.on_directive(directive(target("dp4", 1), 1, PARK, incarnation=1))
    assert seat.wanted is None
    assert seat.lease_until < 0


def test_only_a_serving_leader_with_a_lease_may_step() -> None:
    pair = target("tp2+dp2", 1)
    leader, follower = serving(0, pair), serving(1, pair)
    assert leader.may_step(LEASE_MS - 1)
    assert not leader.may_step(LEASE_MS)
    assert not follower.may_step(0)
    assert not SwitchParticipant(Rank(0), 1).may_step(0)


def test_an_unaffected_group_adopts_the_epoch_and_goes_on() -> None:
    seat = serving(2, target("tp2+dp2", 1))
    changed = target("dp4", 2, 2, 1, 1)
    assert obey(seat, directive(changed, 2, PARK)) == ["Ack"]
    assert seat.may_step(0)
    assert obey(seat, directive(changed, 2, SERVE)) == ["Ack"]
    assert (seat.stage, seat.target) == (Stage(2, SERVE), changed)


def test_a_group_that_comes_back_in_the_same_shape_is_another_formation() -> None:
    seat = serving(0, target("dp4", 1))
    assert obey(seat, directive(target("dp4", 3), 3, SWAP)) == ["Leave", "Join"]


def test_a_leader_leaves_at_its_safe_point_and_parks() -> None:
    pair = target("tp2+dp2", 1)
    seat = serving(0, pair)
    seat.on_directive(directive(target("dp4", 2), 2, PARK, carry=Carry.PAUSE))
    move = seat.next_move(idle=False)
    assert isinstance(move, Leave)
    assert (move.binding, move.carry) == (pair.bindings[0], Carry.PAUSE)
    assert (move.is_leader, move.group_lost) == (True, False)
    seat.made(move)
    assert (seat.binding, seat.serving, seat.stage) == (None, False, Stage(2, PARK))


def test_a_draining_leader_leaves_when_idle_or_told_otherwise() -> None:
    seat = serving(0, target("tp2+dp2", 1))
    apart = target("dp4", 2)
    assert obey(seat, directive(apart, 2, PARK, carry=Carry.DRAIN), idle=False) == []
    assert seat.may_step(0)
    assert isinstance(seat.next_move(idle=True), Leave)
    assert obey(seat, directive(apart, 2, PARK, carry=Carry.RECOMPUTE), idle=False) == [
        "Leave",
        "Join",
    ]


@pytest.mark.parametrize(
    ("carry", "idle", "done"),
    [
        (Carry.DRAIN, False, Carry.RECOMPUTE),
        (Carry.DRAIN, True, Carry.DRAIN),
        (Carry.SPECULATE, False, Carry.RESHARD),
    ],
)
def test_a_leader_that_never_served_waits_for_no_task(
    carry: Carry, idle: bool, done: Carry
) -> None:
    # It took paused tasks up when it joined, and another layout was wanted before it could step.
    seat = SwitchParticipant(Rank(0), 1)
    assert "Join" in obey(seat, directive(target("dp4", 1), 1, SWAP))
    assert not seat.may_step(0)
    seat.on_directive(directive(target("tp2+dp2", 2), 2, PARK, carry=carry))
    move = seat.next_move(idle=idle)
    assert isinstance(move, Leave)
    assert move.carry is done


@pytest.mark.parametrize("idle", [False, True])
def test_a_leader_serves_on_while_a_switch_waits_for_stragglers(idle: bool) -> None:
    seat = serving(0, target("tp2+dp2", 1))
    apart = target("dp4", 2)
    assert obey(seat, directive(apart, 2, PARK, carry=Carry.SPECULATE), idle=idle) == []
    assert seat.may_step(0)
    assert obey(seat, directive(apart, 2, PARK, carry=Carry.RESHARD), idle=idle) == ["Leave"]
    assert seat.is_moving


def test_a_group_that_lost_a_follower_waits_for_no_stragglers() -> None:
    seat = serving(0, target("tp2+dp2", 1))
    seat.on_directive(directive(target("dp1+off1+dp2", 2), 2, PARK, carry=Carry.SPECULATE))
    move = seat.next_move(idle=False)
    assert isinstance(move, Leave)
    assert move.group_lost


def test_a_follower_leaves_only_after_its_leader() -> None:
    seat = serving(1, target("tp2+dp2", 1))
    assert obey(seat, directive(target("dp4", 2), 2, PARK)) == []
    seat.on_leave(0)
    assert make_moves(seat) == [], "an older formation's leave is not this one's"
    seat.on_leave(1)
    assert make_moves(seat) == ["Leave", "Join"]


def test_a_leave_heard_before_its_directive_is_remembered() -> None:
    seat = serving(1, target("tp2+dp2", 1))
    seat.on_leave(1)
    assert make_moves(seat) == []
    assert obey(seat, directive(target("dp4", 2), 2, PARK)) == ["Leave", "Join"]


def test_a_leave_heard_while_parked_frees_a_late_joiner() -> None:
    seat = SwitchParticipant(Rank(1), 1)
    pair = target("tp2+dp2", 5)
    obey(seat, directive(pair, 5, PARK, carry=Carry.RESHARD))
    seat.on_leave(5)
    assert obey(seat, directive(pair, 5, SWAP)) == ["Join"]
    assert obey(seat, directive(target("dp4", 6), 6, PARK)) == ["Leave", "Join"]


@pytest.mark.parametrize(
    ("layout", "members"),
    [("off1+dp3", {}), ("dp4", {0: 2})],
    ids=["cut out", "restarted"],
)
def test_a_follower_whose_leader_is_gone_waits_for_nobody(
    layout: str, members: dict[int, int]
) -> None:
    seat = serving(1, target("tp2+dp2", 1))
    seat.on_directive(directive(target(layout, 2), 2, PARK, members=members))
    move = seat.next_move(idle=True)
    assert isinstance(move, Leave)
    assert move.group_lost


def test_a_group_that_lost_a_follower_does_not_drain() -> None:
    seat = serving(0, target("tp2+dp2", 1))
    seat.on_directive(directive(target("dp1+off1+dp2", 2), 2, PARK, carry=Carry.DRAIN))
    move = seat.next_move(idle=False)
    assert isinstance(move, Leave)
    assert move.group_lost


def test_a_rank_that_is_cut_out_leaves_and_acknowledges() -> None:
    seat = serving(0, target("tp2+dp2", 1))
    without = target("off1+dp3", 2)
    assert obey(seat, directive(without, 2, PARK)) == ["Leave"]
    assert obey(seat, directive(without, 2, SERVE)) == ["Ack"]
    assert obey(seat, directive(target("off1+dp1+tp2", 3), 3, SWAP)) == ["Park", "Ack"]


def test_a_follower_does_not_wait_for_a_leader_that_will_not_come() -> None:
    seat = SwitchParticipant(Rank(1), 1)
    assert obey(seat, directive(target("tp2+dp2", 5), 5, PARK)) == ["Join"]
    apart = target("dp4", 6)
    assert obey(seat, directive(apart, 6, PARK)) == []
    assert obey(seat, directive(apart, 6, PARK, void=4)) == [], "that was another formation"
    assert obey(seat, directive(apart, 6, PARK, void=5)) == ["Leave", "Join"]


def test_where_nothing_moves_the_next_group_is_joined_at_once() -> None:
    seat = serving(0, target("dp4", 1))
    pair = target("tp2+dp2", 2)
    assert obey(seat, directive(pair, 2, PARK, carry=Carry.PAUSE)) == ["Leave", "Join"]
    assert (seat.binding, seat.stage) == (pair.bindings[0], Stage(2, SWAP))
    assert not seat.may_step(0)
    assert obey(seat, directive(pair, 2, SWAP, carry=Carry.PAUSE)) == []
    order = directive(pair, 2, SERVE, grants=[Grant((Rank(0), Rank(1)), 3)])
    assert obey(seat, order) == ["Serve"]
    assert seat.may_step(0)


@pytest.mark.parametrize("carry", [Carry.RESHARD, Carry.SPECULATE])
def test_where_something_may_move_nothing_is_joined_before(carry: Carry) -> None:
    seat = SwitchParticipant(Rank(0), 1)
    assert obey(seat, directive(target("tp2+dp2", 2), 2, PARK, carry=carry)) == ["Park"]
    assert seat.binding is None


def test_a_lapsed_lease_is_not_renewed_by_a_coordinator_that_knows_nothing() -> None:
    seat = serving(0, target("tp2+dp2", 1))
    nothing = Target(())
    seat.on_directive(directive(nothing, 0, PARK, answers_ms=LEASE_MS - 1))
    assert seat.may_step(LEASE_MS), "the report was sent within the lease"
    lapsed_ms = 5 * LEASE_MS
    seat.on_directive(directive(nothing, 0, PARK, answers_ms=lapsed_ms))
    assert not seat.may_step(lapsed_ms), "its followers may be gone"


def test_a_lapsed_lease_is_renewed_by_a_target_with_the_same_formation() -> None:
    seat = serving(0, target("tp2+dp2", 1))
    lapsed_ms = 5 * LEASE_MS
    obey(seat, directive(target("tp2+tp2", 1, 2), 2, PARK, answers_ms=lapsed_ms))
    assert seat.may_step(lapsed_ms)


def test_a_leader_whose_lease_lapsed_cannot_drain() -> None:
    # It may have been cut out and taken in again between two directives that it heard.
    seat = serving(0, target("tp2+dp2", 1))
    order = directive(target("dp4", 4), 4, PARK, carry=Carry.DRAIN, answers_ms=5 * LEASE_MS)
    seat.on_directive(order)
    assert not seat.may_step(5 * LEASE_MS)
    move = seat.next_move(idle=False)
    assert isinstance(move, Leave)
    assert move.group_lost


def test_another_layout_of_an_acknowledged_epoch_is_not_obeyed() -> None:
    seat = SwitchParticipant(Rank(0), 1)
    obey(seat, directive(target("tp2+dp2", 5), 5, PARK, carry=Carry.RESHARD))
    assert obey(seat, directive(target("dp4", 5), 5, SWAP)) == []
    assert obey(seat, directive(target("dp4", 6), 6, SWAP)) == ["Join"]


def test_moves_say_which_directive_they_obey() -> None:
    seat = SwitchParticipant(Rank(0), 1)
    first = directive(target("dp4", 1), 1, PARK, carry=Carry.RESHARD)
    seat.on_directive(first)
    move = seat.next_move(idle=True)
    assert move == Park(first)
    seat.on_directive(directive(target("dp4", 1), 1, SWAP))
    seat.made(move)
    assert seat.stage == Stage(1, PARK)
    assert isinstance(seat.next_move(idle=True), Join)


def wanted_carry(seat: SwitchParticipant) -> Carry:
    assert seat.wanted is not None
    return seat.wanted.carry


def test_the_refreshed_directive_of_a_stage_counts() -> None:
    seat = SwitchParticipant(Rank(0), 1)
    wanted = target("dp4", 1)
    seat.on_directive(directive(wanted, 1, PARK, answers_ms=20, carry=Carry.DRAIN))
    seat.on_directive(directive(wanted, 1, PARK, answers_ms=10, carry=Carry.PAUSE))
    assert wanted_carry(seat) is Carry.DRAIN
    seat.on_directive(directive(wanted, 1, PARK, answers_ms=30, carry=Carry.PAUSE))
    assert wanted_carry(seat) is Carry.PAUSE


def test_ack_names_its_stage() -> None:
    seat = serving(2, target("tp2+dp2", 1))
    seat.on_directive(directive(target("dp4", 2, 2, 1, 1), 2, SWAP))
    move = seat.next_move(idle=False)
    assert isinstance(move, Ack)
    assert move.stage == Stage(2, SWAP)
