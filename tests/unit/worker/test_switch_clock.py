"""What a rank tells of a switch: each measurement once, in the epoch that it belongs to."""

import pytest

from coordinator.protocol.messages.rank import SwitchTimes
from worker.rank.switch_clock import RECENT_STEP_NS, SwitchClock

MS = 1_000_000


class Monotonic:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1_000 * MS


@pytest.fixture
def time() -> Monotonic:
    return Monotonic()


def test_park_is_measured_from_the_first_wish(time: Monotonic) -> None:
    clock = SwitchClock()
    clock.wanted(5, time.now)
    time.now += 3 * MS
    clock.wanted(5, time.now)
    time.now += 4 * MS
    clock.parked(5, time.now - 2 * MS, time.now)
    ended_us = (time.now - 2 * MS) // 1000
    assert clock.take() == (SwitchTimes(5, park_us=7000, old_end_us=ended_us),)
    assert clock.take() == ()


def test_a_rank_that_was_idle_ended_no_step(time: Monotonic) -> None:
    clock = SwitchClock()
    clock.wanted(5, time.now)
    clock.parked(5, time.now - RECENT_STEP_NS, time.now)
    assert clock.take()[0].old_end_us == 0


def test_a_wish_that_was_never_heard_took_no_time(time: Monotonic) -> None:
    clock = SwitchClock()
    clock.parked(5, time.now, time.now)
    assert clock.take()[0].park_us == 0


def test_the_way_from_the_last_old_to_the_first_new_step(time: Monotonic) -> None:
    clock = SwitchClock()
    clock.wanted(5, time.now)
    ended = time.now
    clock.parked(5, ended, time.now)
    clock.copied(5, 0.0015, 4096)
    clock.joined(5, 30)
    clock.begun(is_busy=True)
    clock.leads(5)
    time.now += 9 * MS
    assert clock.stepped(time.now, 800)
    told = clock.take()
    assert told[1] == SwitchTimes(5, reshard_us=1500, reshard_bytes=4096)
    assert told[2] == SwitchTimes(5, swap_us=30)
    assert told[3] == SwitchTimes(5, old_end_us=ended // 1000, new_start_us=time.now // 1000)
    assert told[4] == SwitchTimes(5, first_step_us=800)
    assert not clock.stepped(time.now, 700), "only the first step is told"
    assert clock.take() == ()


def test_a_follower_tells_no_length_of_its_first_step(time: Monotonic) -> None:
    clock = SwitchClock()
    clock.parked(5, time.now, time.now)
    clock.joined(5, 30)
    clock.begun(is_busy=True)
    clock.take()
    assert clock.stepped(time.now, None)
    (told,) = clock.take()
    assert (told.first_step_us, told.new_start_us) == (0, time.now // 1000)


def test_a_group_without_work_does_not_count_the_time_until_some_comes(time: Monotonic) -> None:
    clock = SwitchClock()
    clock.parked(5, time.now, time.now)
    clock.joined(5, 30)
    clock.begun(is_busy=False)
    clock.leads(5)
    clock.take()
    time.now += 900 * MS
    assert clock.stepped(time.now, 800)
    assert clock.take() == (SwitchTimes(5, first_step_us=800),)


def test_a_copy_of_nothing_still_took_part(time: Monotonic) -> None:
    clock = SwitchClock()
    clock.copied(5, 0.0, 0)
    assert clock.take() == (SwitchTimes(5, reshard_us=1, reshard_bytes=0),)


def test_an_overtaken_switch_leaves_nothing_to_the_next(time: Monotonic) -> None:
    clock = SwitchClock()
    clock.wanted(5, time.now)
    clock.parked(5, time.now, time.now)
    clock.wanted(6, time.now)
    time.now += 2 * MS
    clock.parked(6, 0, time.now)
    clock.joined(6, 10)
    clock.begun(is_busy=True)
    clock.take()
    time.now += 2 * MS
    clock.stepped(time.now, None)
    (told,) = clock.take()
    assert (told.epoch, told.old_end_us) == (6, 0)


def test_a_step_behind_one_that_is_under_way_starts_when_that_ends(time: Monotonic) -> None:
    clock = SwitchClock()
    clock.wanted(5, time.now)
    clock.parked(5, None, time.now)
    clock.joined(5, 30)
    clock.begun(is_busy=True)
    launched, time.now = time.now + 2 * MS, time.now + 9 * MS
    clock.quiesced(time.now)
    clock.take()
    assert clock.stepped(launched, None)
    (told,) = clock.take()
    assert told.old_end_us == told.new_start_us == time.now // 1000, "the device never waited"


def test_a_follower_may_launch_before_it_knows_of_the_end(time: Monotonic) -> None:
    clock = SwitchClock()
    clock.parked(5, None, time.now)
    clock.joined(5, 30)
    clock.begun(is_busy=True)
    clock.take()
    assert clock.stepped(time.now, None)
    assert clock.take() == (), "the last old step is under way"
    time.now += 3 * MS
    clock.quiesced(time.now)
    assert clock.take()[-1] == SwitchTimes(
        5, old_end_us=time.now // 1000, new_start_us=time.now // 1000
    )


def test_the_end_of_a_step_that_trailed_is_told(time: Monotonic) -> None:
    clock = SwitchClock()
    clock.parked(5, None, time.now)
    assert clock.take()[0].old_end_us == 0
    clock.quiesced(time.now)
    assert clock.take() == (SwitchTimes(5, old_end_us=time.now // 1000),)
