"""Which of a leader's words about its lease are passed on."""

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.rank import LeaseRetention
from coordinator.protocol.terms import Binding
from coordinator.switching.retained_leases import RetainedLeases

ZERO, ONE = Rank(0), Rank(1)
PAIR = (ZERO, ONE)


def kept(version: int, *indices: int, formation: int = 1) -> LeaseRetention:
    return LeaseRetention(PAIR, version, indices, formation)


def pair(formation: int) -> Binding:
    return Binding(Group(PAIR, Mode.TP), formation)


def test_the_highest_version_wins() -> None:
    leases = RetainedLeases()
    assert leases.on_report(ZERO, (kept(2, 5),))
    assert not leases.on_report(ZERO, (kept(1, 5, 6),))
    assert leases.for_rank(ONE) == (kept(2, 5),)
    assert leases.for_rank(Rank(2)) == ()


def test_only_the_leader_is_believed() -> None:
    leases = RetainedLeases()
    assert not leases.on_report(ONE, (kept(1, 5),))
    assert leases.for_rank(ONE) == ()


def test_nothing_changes_under_a_group_that_serves() -> None:
    leases = RetainedLeases()
    leases.on_report(ZERO, (kept(1, 5),))
    leases.bind(pair(2))
    assert not leases.on_report(ZERO, (kept(2),))
    assert leases.for_rank(ONE) == (kept(1, 5),)


def test_what_was_kept_of_an_earlier_formation_says_nothing_of_a_later_one() -> None:
    leases = RetainedLeases()
    leases.on_report(ZERO, (kept(1, 5, formation=1),))
    leases.bind(pair(2))
    leases.unbind(pair(2))
    assert not leases.on_report(ZERO, (kept(9, formation=1),)), "sent before the formation leased"
    assert leases.on_report(ZERO, (kept(2, 7, formation=2),))
    assert leases.for_rank(ONE) == (kept(2, 7, formation=2),)


def test_a_lost_member_makes_the_lease_worthless_whatever_its_leader_says() -> None:
    leases = RetainedLeases()
    leases.on_report(ZERO, (kept(3, 5),))
    leases.drop(ONE, 4)
    assert leases.for_rank(ZERO) == (kept(4, formation=4),)
    assert not leases.on_report(ZERO, (kept(8, 5),)), "the leader had not heard of it"
    leases.on_report(ZERO, (kept(8, 5, formation=4),))
    assert leases.for_rank(ZERO) == (kept(8, formation=4),)
    leases.on_report(ZERO, (kept(9, 5, formation=5),))
    assert leases.for_rank(ZERO) == (kept(9, 5, formation=5),), "formed after the loss"


def test_a_lease_of_an_earlier_coordinators_time_is_given_up_by_all() -> None:
    leases = RetainedLeases()
    leases.know(pair(6))
    leases.drop(ZERO, 8)
    assert leases.for_rank(ONE) == (kept(1, formation=8),)


def test_a_lost_member_of_an_unknown_lease_counts_too() -> None:
    leases = RetainedLeases()
    leases.drop(ONE, 4)
    leases.on_report(ZERO, (kept(1, 5, formation=3),))
    assert leases.for_rank(ONE) == (kept(1, formation=3),)


def test_a_rank_that_is_alone_leases_nothing() -> None:
    leases = RetainedLeases()
    leases.bind(Binding(Group((ZERO,), Mode.DP), 1))
    leases.drop(ZERO, 1)
    assert leases.for_rank(ZERO) == ()


def test_what_a_member_gave_up_under_an_earlier_coordinator_is_worth_nothing() -> None:
    """It had heard that the leader was lost, which lives and tells what its tasks hold."""
    leases = RetainedLeases()
    leases.recover({ZERO: (PAIR,), ONE: ()}, 4)
    assert leases.for_rank(ZERO) == (kept(1, formation=4),)
    leases.on_report(ZERO, (kept(8, 5, formation=2),))
    assert leases.for_rank(ZERO) == (kept(1, formation=4),), "formed before"
    leases.on_report(ZERO, (kept(9, 5, formation=5),))
    assert leases.for_rank(ZERO) == (kept(9, 5, formation=5),), "formed since"


def test_what_all_members_have_is_kept_under_a_new_coordinator() -> None:
    leases = RetainedLeases()
    leases.recover({ZERO: (PAIR,), ONE: (PAIR,)}, 4)
    leases.on_report(ZERO, (kept(8, 5, formation=2),))
    assert leases.for_rank(ONE) == (kept(8, 5, formation=2),)


def test_a_member_that_was_not_heard_says_nothing_of_a_lease() -> None:
    leases = RetainedLeases()
    leases.recover({ZERO: (PAIR,)}, 4)
    leases.on_report(ZERO, (kept(8, 5, formation=2),))
    assert leases.for_rank(ONE) == (kept(8, 5, formation=2),)
