"""Which ranks are started again, when, together with whom, and as which incarnation."""

import pytest

from comm_pool.layout import Rank
from worker.cohort import Cohort
from worker.launch.restarts import (
    KNOWN_S,
    LONGEST_DELAY_S,
    MOVED_S,
    STEADY_S,
    Restarts,
    split,
)

WIDTHS = (1, 2, 4)
TOGETHER_S = 1.5


def ranks(*numbers: int) -> tuple[Rank, ...]:
    return tuple(map(Rank, numbers))


def started(world: int = 4, wall_s: int = 100) -> Restarts:
    """A cell whose ranks serve."""
    made = Restarts(world, TOGETHER_S)
    cohort = Cohort(1, ranks(*range(world)), 0)
    for rank in cohort.ranks:
        assert made.started(rank, cohort, wall_s) == wall_s
        made.ready(rank, 0.0)
    return made


@pytest.mark.parametrize(
    ("due", "together"),
    [
        ((0, 1, 2, 3), [(0, 1, 2, 3)]),
        ((0, 1), [(0, 1)]),
        ((1, 2), [(1,), (2,)]),
        ((0, 1, 3), [(0, 1), (3,)]),
        ((), []),
    ],
)
def test_whole_groups_start_together(due: tuple[int, ...], together: list[tuple[int, ...]]) -> None:
    assert split(ranks(*due), WIDTHS, 4) == together


def test_all_ranks_start_together_whatever_their_number() -> None:
    assert split(ranks(0, 1, 2), (1,), 3) == [(0, 1, 2)]
    assert split(ranks(0, 2), (1,), 3) == [(0,), (2,)]


def test_all_were_ready_once_each_has_been() -> None:
    made = Restarts(2, TOGETHER_S)
    cohort = Cohort(1, ranks(0, 1), 0)
    for rank in cohort.ranks:
        made.started(rank, cohort, 100)
    made.ready(Rank(0), 1.0)
    assert not made.all_were_ready
    made.ready(Rank(1), 1.0)
    made.exited(Rank(0), 2.0)
    assert made.all_were_ready


def test_incarnations_grow_however_soon_a_rank_is_started() -> None:
    made, alone = started(), Cohort(2, ranks(1), 0)
    assert made.started(Rank(1), alone, 100) == 101
    assert made.started(Rank(1), alone, 90) == 102
    assert made.started(Rank(1), alone, 500) == 500


def test_those_that_end_a_moment_later_are_started_with_the_first() -> None:
    made = started()
    assert made.exited(Rank(0), 10.0) == TOGETHER_S
    assert made.next_due_s() == 10.0 + TOGETHER_S
    made.exited(Rank(1), 11.0)
    assert made.take_due(11.4) == []
    assert made.take_due(11.5) == [0, 1]
    assert made.ended() == ((0, 100), (1, 100))


def test_what_was_started_is_due_no_more() -> None:
    made = started()
    made.exited(Rank(2), 10.0)
    made.started(Rank(2), Cohort(2, ranks(2), 0), 110)
    assert made.next_due_s() is None
    assert made.take_due(1e9) == []


def test_a_rank_that_fails_again_and_again_is_tried_less_often() -> None:
    made = started()
    delays = [made.exited(Rank(0), 10.0) for _ in range(12)]
    assert delays[:3] == [TOGETHER_S, 2 * TOGETHER_S, 4 * TOGETHER_S]
    assert delays[-1] == LONGEST_DELAY_S
    made.ready(Rank(0), 20.0)
    assert made.exited(Rank(0), 21.0 + STEADY_S) == TOGETHER_S


def passes(*counts: int) -> dict[Rank, int]:
    """Of the main loops of ranks 1, 2 and 3."""
    return dict(zip(ranks(1, 2, 3), counts, strict=True))


def lost(ended_s: float = 10.0) -> Restarts:
    """A cell of four whose rank 0 has ended."""
    made = started()
    made.exited(Rank(0), ended_s)
    return made


APART_S = 1.25 * MOVED_S
LOOKS = (10.0 + KNOWN_S, 10.0 + KNOWN_S + APART_S, 10.0 + KNOWN_S + 2 * APART_S)
"""Of the launcher, once all know that rank 0 has ended at 10."""


def serve_on(made: Restarts, *others: int, until_s: float = 12.0) -> None:
    """Let the main loops of these ranks make passes."""
    for number in range(1 + round((until_s - 10.0) / APART_S)):
        found = dict.fromkeys(ranks(*others), number)
        made.hasten(found, 10.0 + number * APART_S)


def test_a_rank_starts_once_all_others_have_left_the_groups_they_had_with_it() -> None:
    made = lost()
    made.hasten(passes(5, 5, 5), LOOKS[0])
    made.hasten(passes(6, 7, 5), LOOKS[1])
    assert made.take_due(LOOKS[1]) == [], "rank 3 may be about to end"
    made.hasten(passes(7, 8, 6), LOOKS[2])
    assert made.take_due(LOOKS[2]) == [0]


def test_a_rank_that_stands_still_now_may_be_about_to_end_whatever_it_did_before() -> None:
    made = lost()
    made.hasten(passes(5, 5, 5), LOOKS[0])
    made.hasten(passes(5, 6, 6), LOOKS[1])
    made.hasten(passes(6, 7, 6), LOOKS[2])
    assert made.take_due(LOOKS[2]) == [], "rank 3"


def test_passes_before_the_loss_is_known_show_nothing() -> None:
    made = lost()
    for number in range(3):
        made.hasten(passes(number, number, number), 10.0 + number * MOVED_S)
    assert made.next_due_s() == 10.0 + TOGETHER_S


def test_looks_that_follow_each_other_at_once_show_nothing() -> None:
    made = lost()
    for number in range(9):
        made.hasten(passes(number, number, number), LOOKS[0] + number * MOVED_S / 10)
    assert made.next_due_s() == 10.0 + TOGETHER_S


def test_a_rank_whose_passes_are_unknown_holds_a_restart_up() -> None:
    made = lost()
    serve_on(made, 1, 3)
    assert made.next_due_s() == 10.0 + TOGETHER_S


def test_ranks_that_end_one_after_the_other_still_start_together() -> None:
    made = lost()
    made.exited(Rank(1), 10.4)
    serve_on(made, 2, 3, until_s=10.5)
    assert made.take_due(10.5) == []
    serve_on(made, 2, 3, until_s=10.75)
    assert made.take_due(10.75) == [0, 1]


def test_where_no_rank_is_left_to_show_anything_all_wait_as_before() -> None:
    made = started(world=2)
    for rank in ranks(0, 1):
        made.exited(rank, 10.0)
    serve_on(made)
    assert made.next_due_s() == 10.0 + TOGETHER_S


def end_again(made: Restarts, rank: Rank, ended_s: float) -> None:
    """Let a rank end, start and end before it is ready."""
    made.exited(rank, 2.0)
    made.started(rank, Cohort(2, (rank,), 0), 110)
    made.exited(rank, ended_s)


def test_a_rank_that_fails_again_gets_its_delay_whatever_others_do() -> None:
    made = started()
    end_again(made, Rank(0), 10.0)
    serve_on(made, 1, 2, 3)
    assert made.next_due_s() == 10.0 + 2 * TOGETHER_S


def test_a_rank_waits_for_one_that_has_failed_before_to_start_with_it() -> None:
    made = started()
    end_again(made, Rank(1), 9.5)
    made.exited(Rank(0), 10.0)
    serve_on(made, 2, 3)
    assert made.next_due_s() == 10.0 + TOGETHER_S
    assert made.take_due(10.0 + TOGETHER_S) == [0, 1]


def test_ends_that_were_asked_for_do_not_count() -> None:
    made = started()
    made.exited(Rank(0), 10.0)
    made.exited(Rank(0), 10.0)
    made.forgive()
    assert made.next_due_s() is None
    assert made.exited(Rank(0), 20.0) == TOGETHER_S


def test_a_start_that_fails_holds_up_its_peers() -> None:
    made, cohort = started(), Cohort(2, ranks(0, 1), 0)
    for rank in cohort.ranks:
        made.exited(rank, 10.0)
        made.started(rank, cohort, 110)
    assert made.waits_for(Rank(0)) == [1]
    made.ready(Rank(1), 12.0)
    assert made.waits_for(Rank(0)) == []
    made.ready(Rank(0), 12.0)
    made.exited(Rank(0), 13.0)
    assert made.waits_for(Rank(1)) == []


def test_a_rank_that_left_is_told_and_not_started() -> None:
    made = started()
    made.record_end(Rank(3))
    assert made.ended() == ((3, 100),)
    assert made.next_due_s() is None


def sharing(world: int = 4) -> Restarts:
    """A cell whose ranks share memory and were started together; none is ready."""
    made = Restarts(world, TOGETHER_S, shares_memory=True)
    cohort = Cohort(1, ranks(*range(world)), 0)
    for rank in cohort.ranks:
        made.started(rank, cohort, 100)
    return made


def test_until_all_have_prepared_what_they_share_all_start_together() -> None:
    made = sharing()
    delays = [made.exited(Rank(1), 0.0) for _ in range(3)]
    assert delays[-1] == 6.0
    assert made.next_due_s() is None
    assert made.take_due(100.0) == [], "the others have not ended"
    for rank in ranks(0, 2, 3):
        made.exited(rank, 1.0)
    assert made.next_due_s() == 6.0
    assert made.take_due(5.9) == []
    assert made.take_due(6.0) == list(ranks(0, 1, 2, 3))


def test_one_that_is_ready_shows_that_others_can_be_joined() -> None:
    made = sharing()
    made.ready(Rank(0), 0.0)
    assert made.exited(Rank(1), 1.0) == TOGETHER_S
    assert made.take_due(1.0 + TOGETHER_S) == [Rank(1)]
    joining = Cohort(1, ranks(1), 0, joins=True)
    made.started(Rank(1), joining, 102)
    assert made.waits_for(Rank(1)) == [], "nobody waits for one that joins"
    # It ends before it is ready: what it was to join is still there.
    made.exited(Rank(1), 3.0)
    assert made.take_due(3.0 + 2 * TOGETHER_S) == [Rank(1)]


def test_all_that_start_anew_share_nothing_yet() -> None:
    made = sharing()
    made.ready(Rank(0), 0.0)
    anew = Cohort(2, ranks(0, 1, 2, 3), 0)
    for rank in anew.ranks:
        made.started(rank, anew, 110)
    made.exited(Rank(2), 120.0)
    assert made.take_due(200.0) == []


def in_blocks() -> Restarts:
    """Four ranks that serve, of which two neighbours each hold the weights."""
    made = Restarts(4, TOGETHER_S, block=2)
    cohort = Cohort(1, ranks(0, 1, 2, 3), 0)
    for rank in cohort.ranks:
        made.started(rank, cohort, 100)
        made.ready(rank, 0.0)
    return made


def test_who_cannot_serve_without_a_rank_ends_and_starts_with_it() -> None:
    made = in_blocks()
    assert made.exited(Rank(3), 10.0) == TOGETHER_S
    assert made.fall_with(Rank(3)) == [2]
    assert made.next_due_s() is None, "its neighbour has not ended"
    assert made.take_due(100.0) == []
    made.exited(Rank(2), 10.4)
    assert made.fall_with(Rank(2)) == []
    assert made.next_due_s() == 10.4 + TOGETHER_S
    assert made.take_due(12.0) == [2, 3]
    again = Cohort(2, ranks(2, 3), 0)
    for rank in again.ranks:
        made.started(rank, again, 110)
    assert made.next_due_s() is None
    made.exited(Rank(2), 20.0)
    assert made.fall_with(Rank(2)) == [3]


def test_a_block_starts_once_the_other_blocks_have_shown_that_they_go_on() -> None:
    made = in_blocks()
    made.exited(Rank(3), 10.0)
    serve_on(made, 0, 1, 2, until_s=11.0)
    assert made.take_due(11.0) == [], "its neighbour has not ended"
    made.exited(Rank(2), 11.0)
    serve_on(made, 0, 1)
    assert made.take_due(12.0) == [2, 3]


def test_a_block_is_not_hastened_past_the_delay_of_one_that_fails_again() -> None:
    made = in_blocks()
    end_again(made, Rank(0), 10.0)
    made.exited(Rank(1), 10.1)
    serve_on(made, 2, 3)
    assert made.next_due_s() == 10.0 + 2 * TOGETHER_S


def test_only_who_ends_first_in_a_block_is_at_fault() -> None:
    made = in_blocks()
    made.exited(Rank(3), 10.0)
    assert made.without_fault() == ()
    made.exited(Rank(2), 10.4)
    assert made.without_fault() == ranks(2)
    again = Cohort(2, ranks(2, 3), 0)
    for rank in again.ranks:
        made.started(rank, again, 110)
    made.exited(Rank(2), 20.0)
    made.exited(Rank(3), 20.1)
    assert made.without_fault() == ranks(3)


def test_who_is_ended_on_demand_is_not_at_fault() -> None:
    made = in_blocks()
    made.renew(ranks(1), 10.0)
    made.record_end(Rank(1))
    made.record_end(Rank(0))
    assert made.without_fault() == ranks(0, 1)


def test_ranks_that_serve_without_each_other_are_at_fault() -> None:
    made = Restarts(2, TOGETHER_S, shares_memory=True)
    cohort = Cohort(1, ranks(0, 1), 0)
    for rank in cohort.ranks:
        made.started(rank, cohort, 100)
        made.ready(rank, 0.0)
    made.exited(Rank(0), 10.0)
    made.exited(Rank(1), 10.0)
    assert made.without_fault() == ()


def test_a_block_waits_for_the_one_of_it_that_fails_most() -> None:
    made = in_blocks()
    alone = Cohort(2, ranks(0), 0)
    for _ in range(3):
        made.exited(Rank(0), 10.0)
        made.started(Rank(0), alone, 110)
    made.exited(Rank(0), 20.0)
    assert made.exited(Rank(1), 20.1) == pytest.approx(8 * TOGETHER_S - 0.1)
    assert made.take_due(20.0 + 7 * TOGETHER_S) == []
    assert made.take_due(20.0 + 8 * TOGETHER_S) == [0, 1]


def test_a_block_is_ended_on_demand_as_a_whole() -> None:
    """Its other ranks would wait for ever for those that start without them."""
    made = in_blocks()
    assert made.renew(ranks(1), 10.0) == (0, 1)
    made.record_end(Rank(1))
    assert made.take_due(11.0) == []
    made.record_end(Rank(0))
    assert made.take_due(11.0) == [0, 1]


def test_ranks_that_are_ended_on_demand_start_together_when_all_have_ended() -> None:
    made = started()
    made.renew(ranks(0, 1), 10.0)
    assert made.take_due(10.0) == []
    assert made.next_due_s() is None
    made.record_end(Rank(1))
    assert made.take_due(11.0) == []
    made.record_end(Rank(0))
    assert made.take_due(11.0) == [0, 1], "the others serve on"
    for rank in ranks(0, 1):
        made.started(rank, Cohort(2, ranks(0, 1), 0), 111)
    assert made.next_due_s() is None
    assert made.exited(Rank(0), 200.0) == TOGETHER_S, "alone, as any other"
    assert made.take_due(300.0) == [0]


def test_one_that_was_lost_meanwhile_is_waited_for_by_who_is_ended_on_demand() -> None:
    made = started()
    delay_s = made.exited(Rank(1), 10.0)
    made.renew(ranks(0, 1), 10.0)
    assert made.take_due(10.0 + delay_s) == []
    made.record_end(Rank(0))
    assert made.take_due(10.0 + delay_s) == [0, 1]
