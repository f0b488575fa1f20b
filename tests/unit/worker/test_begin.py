"""What a rank waits for before anything is written to the pages of a group that begins."""

from tests.harness.worker.leading_member import ALONE, WIDE, Stage
from worker.io.step_queue import Begin


def test_members_meet_behind_their_copies_before_pages_can_be_written() -> None:
    stage = Stage()
    stage.has_moved_to(WIDE, ends_late=True)
    stage.runtime.serve(WIDE, (), 3)
    assert stage.done == ["send", "go_before", "meet", "grant"]
    assert [(type(each), each.meets) for each in stage.sent()] == [(Begin, True)]


def test_a_group_whose_copies_are_over_meets_nobody() -> None:
    stage = Stage()
    stage.has_moved_to(WIDE, ends_late=False)
    stage.runtime.serve(WIDE, (), 3)
    assert stage.done == ["send", "end_all", "grant"]
    assert not stage.sent()[0].meets


def test_a_rank_alone_waits_for_the_copies_of_a_move_that_came_to_nothing() -> None:
    stage = Stage()
    stage.has_moved_to(WIDE, ends_late=True)
    stage.runtime.unbind()
    stage.runtime.join(ALONE)
    stage.runtime.begin(3, (), -1)
    assert stage.done == ["end_all", "grant"]


def test_members_meet_once() -> None:
    stage = Stage()
    stage.has_moved_to(WIDE, ends_late=True)
    stage.runtime.serve(WIDE, (), 1)
    stage.runtime.unbind()
    stage.runtime.join(WIDE)
    stage.runtime.serve(WIDE, (), 1)
    assert [each.meets for each in stage.sent()] == [True, False]


def test_a_follower_does_what_its_leader_says() -> None:
    stage = Stage(1)
    stage.runtime.join(WIDE)
    stage.leader_queue.enqueue(Begin(WIDE.formation, (), 3, -1, meets=True))
    stage.runtime.follow(WIDE)
    assert stage.done == ["go_before", "meet"]
