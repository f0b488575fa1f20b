"""What counts as news of a rank, and what its pages hold."""

import pytest
from msgspec.structs import replace

from comm_pool.layout import Group, Layout, Mode, Rank
from coordinator.model.weight_parts import WeightParts
from coordinator.protocol.terms import Phase, Stage
from coordinator.ranks.roster import Arrival, Roster, blocks_per_page
from kvadaptor.geometry import PageGeometry, Split
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


def alone(rank: int) -> Group:
    return Group((Rank(rank),), Mode.DP)


def quarters(*, outlive: bool) -> Roster:
    """Two blocks of four ranks that hold a quarter of the weights each."""
    made = Roster(8, 1, WeightParts(4, 4, borrows=True, outlive=outlive))
    for rank in range(8):
        made.on_hello(hello(rank), 0)
    return made


def serving(ranks: Roster) -> list[int]:
    return [rank for rank in range(8) if ranks.serves(alone(rank))]


def test_ranks_that_borrow_serve_once_all_lenders_were_heard() -> None:
    ranks = Roster(8, 1, WeightParts(4, 4, borrows=True, outlive=True))
    for rank in (0, 1, 3, 4):
        ranks.on_hello(hello(rank), 0)
    assert ranks.lacking(alone(0)) == 2
    assert serving(ranks) == []
    ranks.on_hello(hello(2), 0)
    assert serving(ranks) == [0, 1, 2, 3]


def test_a_lost_lender_stops_nobody_where_its_memory_outlives_it() -> None:
    ranks = quarters(outlive=True)
    ranks.on_exited(ONE)
    assert serving(ranks) == list(range(8))
    ranks.on_hello(hello(1, 2), 1)
    assert serving(ranks) == list(range(8))


def test_where_memory_ends_with_its_process_a_block_waits_until_it_started_together() -> None:
    ranks = quarters(outlive=False)
    ranks.on_exited(ONE)
    assert ranks.lacking(alone(0)) == 1
    for rank in (1, 0, 2):
        ranks.on_hello(hello(rank, 2, widths=(1, 2, 4), cohort=1), 1)
        assert serving(ranks) == [4, 5, 6, 7], "one cohort lends nothing to another"
    ranks.on_hello(hello(3, 2, widths=(1, 2, 4), cohort=1), 1)
    assert serving(ranks) == list(range(8))


def test_a_group_needs_no_lender_for_what_its_members_hold() -> None:
    ranks = quarters(outlive=False)
    for rank in (2, 3):
        ranks.on_exited(Rank(rank))
    pair = Group((Rank(0), ONE), Mode.TP)
    four = Group(tuple(map(Rank, range(4))), Mode.SP)
    assert not ranks.serves(pair)
    assert ranks.serves(four)
    assert not ranks.serves_whole(Layout((pair, alone(4))))
    assert ranks.serves_whole(Layout((alone(4), alone(5))))


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("split", [Split(1, 1), Split(1, 4), Split(4, 1), Split(2, 2), Split(2, 4)])
def test_pages_have_the_blocks_that_ranks_make_of_them(kv_heads: int, split: Split) -> None:
    """Members that are more than the heads share them, unless they have other layers."""
    geometry = PageGeometry(8, kv_heads, 16, 16, 2, 16)
    sent = replace(hello(0), kv_heads=kv_heads)
    assert blocks_per_page(sent, split.width, split.pp) == geometry.slots(split).count
