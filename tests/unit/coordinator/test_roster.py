"""What counts as news of a rank."""

from comm_pool.layout import Rank
from coordinator.protocol.terms import Phase, Stage
from coordinator.ranks.roster import Arrival, Roster
from tests.harness.coordinator.builders import hello, report

ONE = Rank(1)


def roster() -> Roster:
    made = Roster(4)
    assert made.on_hello(hello(1, 5), 0) is Arrival.FIRST
    return made


def test_arrivals() -> None:
    ranks = roster()
    assert ranks.on_hello(hello(1, 5), 1) is Arrival.AGAIN
    assert ranks.on_hello(hello(1, 4), 2) is Arrival.STALE
    assert ranks.on_hello(hello(1, 6), 3) is Arrival.RESTARTED
    assert (ranks[ONE].incarnation, ranks[ONE].restarts) == (6, 1)


def test_a_process_that_ended_is_not_heard_again() -> None:
    ranks = roster()
    ranks.on_exited(ONE)
    assert not ranks.on_report(report(1, Stage(1, Phase.PARK), incarnation=5), 1)
    assert ranks.on_hello(hello(1, 5), 1) is Arrival.STALE
    assert ranks.on_hello(hello(1, 6), 1) is Arrival.RESTARTED


def test_reports_of_other_incarnations_do_not_count() -> None:
    ranks = roster()
    assert not ranks.on_report(report(1, Stage(1, Phase.PARK), incarnation=4), 1)
    assert not ranks.on_report(report(1, Stage(1, Phase.PARK), incarnation=6), 1)
    assert not ranks.on_report(report(2, Stage(1, Phase.PARK)), 1)
    assert ranks.reported() == ()


def test_an_older_report_shows_life_and_replaces_nothing() -> None:
    ranks = roster()
    newer = report(1, Stage(1, Phase.SWAP), sent_at_ms=20, incarnation=5)
    older = report(1, Stage(1, Phase.PARK), sent_at_ms=10, incarnation=5)
    assert ranks.on_report(newer, 100)
    assert ranks.on_report(older, 200)
    assert ranks.report_of(ONE) is newer
    assert ranks.silent_since(ONE, 250) == 50


def test_ranks_support_the_widths_of_their_cohort() -> None:
    ranks = roster()
    for rank in (0, 2, 3):
        ranks.on_hello(hello(rank), 0)
    assert ranks.supports(ONE, 4)
    assert not ranks.supports(ONE, 8)
    ranks.on_hello(hello(1, 6, widths=(1,), cohort=1), 1)
    assert ranks.supports(ONE, 1)
    assert not ranks.supports(ONE, 2)
    assert not ranks.supports(Rank(0), 2), "its peer is in another cohort"
    assert [ranks.is_degraded(Rank(rank)) for rank in range(4)] == [True, True, False, False]
    assert ranks.supports(Rank(2), 2)
    assert not ranks.supports(Rank(2), 4)


def test_ranks_that_started_together_again_have_each_other() -> None:
    ranks = roster()
    ranks.on_hello(hello(0), 0)
    for rank in (0, 1):
        ranks.on_hello(hello(rank, 6, widths=(1, 2), cohort=1), 1)
    assert ranks.supports(ONE, 2)
    assert not ranks.supports(ONE, 4)
    assert not ranks.is_degraded(ONE)


def test_a_group_that_a_member_has_closed_is_closed_as_long_as_its_process_lives() -> None:
    ranks, stage = roster(), Stage(1, Phase.PARK)
    for rank in (0, 2, 3):
        ranks.on_hello(hello(rank), 0)
    pair, four = (Rank(0), ONE), tuple(map(Rank, range(4)))
    assert ranks.can_form(four)
    closed_before = ranks.has_closed
    assert ranks.on_report(report(0, stage, sent_at_ms=20, closed=[four]), 1)
    assert (closed_before, ranks.has_closed) == (False, True)
    assert (ranks.closed_by(four), ranks.closed_by(pair)) == (0, None)
    assert [ranks.supports(rank, 4) for rank in four] == [False] * 4
    assert ranks.can_form(pair)
    assert not ranks.is_degraded(ONE), "there are other groups"
    # An older report is no word of its being open again.
    assert ranks.on_report(report(0, stage, sent_at_ms=10), 2)
    assert ranks.on_report(report(0, stage, sent_at_ms=30, closed=[pair]), 3)
    assert not ranks.can_form(four)
    assert not ranks.can_form(pair)
    ranks.on_hello(hello(0, 2), 4)
    assert not ranks.has_closed
    assert ranks.can_form(four)


def test_a_rank_is_not_degraded_where_no_groups_are_wide() -> None:
    ranks = Roster(1)
    ranks.on_hello(hello(0, widths=(1,)), 0)
    assert not ranks.is_degraded(Rank(0))


def test_the_end_of_an_older_session_is_not_the_end_of_a_newer_process() -> None:
    ranks = roster()
    ranks.on_closed(ONE, 4)
    assert ranks[ONE].is_connected
    ranks.on_closed(ONE, 5)
    assert not ranks[ONE].is_connected
