"""What a leader tells of served steps."""

from dataclasses import dataclass

import pytest

from comm_pool.layout import Mode, StepMode
from comm_pool.mixed import Mixed, Staged
from coordinator.model.step_line import fit
from worker.rank.step_log import StepLog

MS = 1_000_000


@dataclass
class Plan:
    tokens: int
    context: int = 0
    mode: StepMode = Mode.DP


def test_sums_fit_what_was_served() -> None:
    log, now = StepLog(), 0
    for tokens in (1, 2, 8, 64, 512) * 20:
        took = 10 * MS + tokens * MS // 10
        log.ended(Plan(tokens), 1, now, now + took)
        now += took
    (told,) = log.take()
    line = fit(told.sums)
    assert line is not None
    assert (told.mode, told.width, told.sums.steps) == (Mode.DP, 1, 100)
    assert line.seconds(512, 0) == pytest.approx(0.0612, rel=0.01)
    assert log.take() == ()


def test_a_step_launched_behind_another_lasts_from_its_end() -> None:
    log = StepLog()
    log.ended(Plan(1), 1, 0, 10 * MS)
    log.ended(Plan(1), 1, 2 * MS, 20 * MS)
    (told,) = log.take()
    assert told.sums.y / told.sums.n == pytest.approx(0.010)


@pytest.mark.parametrize("staged", [Staged(2), Staged(4), Staged(2, 2)])
def test_a_step_of_a_pipeline_group_counts_with_the_time_of_one_stage(staged: Staged) -> None:
    """However many of its stages have work: one step alone takes all of them one by one."""
    log, stage_ns = StepLog(), 10 * MS
    plan, stages, width = Plan(8, mode=staged), staged.pp, staged.width
    for _ in range(10):
        log.ended(plan, width, (now := 1_000 * MS), now + stages * stage_ns, busy=1 / stages)
        log.ended(Plan(0), width, now, now)
    for turn in range(1, 11):
        log.ended(plan, width, 0, 2_000 * MS + turn * stage_ns)
    (served,) = log.take()
    assert (served.name, served.width) == (str(staged), width)
    assert served.sums.y / served.sums.n == pytest.approx(0.010)
    assert log.usual_s(plan, width) == pytest.approx(0.010, rel=0.1)


def test_steps_of_mixed_groups_and_of_a_pipeline_that_drains_are_left_out() -> None:
    log = StepLog()
    log.ended(Plan(8, mode=Mixed(2, 2)), 4, 0, 10 * MS)
    log.ended(Plan(8, mode=Staged(2)), 2, 0, 30 * MS, busy=0.0)
    assert log.take() == ()


def test_outliers_and_empty_steps_are_left_out() -> None:
    log, now = StepLog(), 0
    for number in range(60):
        took = 500 * MS if number == 50 else 10 * MS
        log.ended(Plan(4), 2, now, now + took)
        now += took
    log.ended(Plan(0), 2, now, now + MS)
    (told,) = log.take()
    assert told.sums.steps == 59


def test_a_step_that_looks_far_too_short_is_left_out() -> None:
    log, now = StepLog(), 0
    for number in range(60):
        took = MS // 100 if number == 50 else 10 * MS
        log.ended(Plan(4), 2, now, now + took)
        now += took
    (served,) = log.take()
    assert served.sums.steps == 59
    line = fit(served.sums)
    assert line is not None
    assert line.seconds(4, 0) == pytest.approx(0.010)


def test_the_device_is_believed_where_it_tells_its_times() -> None:
    """While the host launches a long step, it does not see the one before end.

    By the host's clock the short one takes as long as the launch, and the long one nothing.
    """
    log, now = StepLog(), 0
    for _ in range(20):
        launched = now + 28 * MS
        log.ended(Plan(1), 2, now, launched, device_s=0.004)
        now = launched + MS // 10
        log.ended(Plan(1_800), 2, launched - 28 * MS, now, device_s=0.030)
    (served,) = log.take()
    line = fit(served.sums)
    assert line is not None
    assert served.sums.steps == 40
    assert line.seconds(1, 0) == pytest.approx(0.004, rel=0.01)
    assert line.seconds(1_800, 0) == pytest.approx(0.030, rel=0.01)


def test_it_knows_how_long_steps_of_a_size_usually_take() -> None:
    log, now = StepLog(), 0
    assert log.usual_s(Plan(4), 1) is None
    for number in range(100):
        took = (200 if number % 10 == 9 else 10) * MS
        log.ended(Plan(4), 1, now, now + took)
        now += took
    assert log.usual_s(Plan(5), 1) == pytest.approx(0.010, rel=0.2), "of a similar size"
    assert log.usual_s(Plan(4), 2) is None
    assert log.usual_s(Plan(64), 1) is None


def test_steps_that_only_waited_for_loans_are_counted_apart() -> None:
    """Up to 5 % above the floor; what takes longer computes."""
    log, now = StepLog(), 0
    for tokens, took_ms in ((1, 80), (64, 83), (1_024, 93), (2_048, 183)):
        log.ended(Plan(tokens), 1, now, now + took_ms * MS, 80_000)
        now += took_ms * MS
    (served,) = log.take()
    assert (served.sums.steps, served.at_floor.steps) == (2, 2)
    assert served.at_floor.n / served.at_floor.y == pytest.approx(1 / 0.0815, rel=0.01)
    line = fit(served.sums)
    assert line is not None
    assert line.seconds(2_048, 0) == pytest.approx(0.183, rel=0.01)
    assert log.usual_s(Plan(1), 1) == pytest.approx(0.08, rel=0.1), "it still takes so long"
