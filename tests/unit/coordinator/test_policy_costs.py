"""Step times: fits of lines, what served steps change, files of them."""

import random

import pytest

from comm_pool.layout import Mode
from coordinator.model.cost_model import GroupCost, StepFits
from coordinator.model.step_line import StepLine, fit, mean_ratio, plus, scaled, sums_of
from coordinator.policy.step_file import parse_step_times
from coordinator.protocol.messages.steps import ServedSteps, StepSums, WidthTimes

LINE = StepLine(0.0215, 0.000109, 8.2e-8)


def steps(line: StepLine, count: int, noise: float = 0.0) -> list[tuple[float, float, float]]:
    draw = random.Random(3)
    found = []
    for _ in range(count):
        tokens, context = draw.randint(1, 4_096), draw.randint(0, 100_000)
        seconds = line.seconds(tokens, context) * (1 + draw.uniform(-noise, noise))
        found.append((float(tokens), float(context), seconds))
    return found


def test_a_line_is_found_again() -> None:
    found = fit(sums_of(steps(LINE, 50)))
    assert found is not None
    assert found.base_s == pytest.approx(LINE.base_s, rel=1e-3)
    assert found.token_s == pytest.approx(LINE.token_s, rel=1e-3)
    assert found.context_s == pytest.approx(LINE.context_s, rel=1e-3)


def test_no_part_is_ever_negative() -> None:
    falling = [(1.0, 0.0, 0.02), (100.0, 0.0, 0.015), (200.0, 5_000.0, 0.012)]
    found = fit(sums_of(falling))
    assert found is not None
    assert min(found.base_s, found.token_s, found.context_s) >= 0
    assert found.seconds(100, 0) == pytest.approx(0.015, rel=0.25)


def test_nothing_fits_nothing() -> None:
    assert fit(StepSums()) is None


def test_noise_leaves_predictions_within_a_few_percent() -> None:
    found = fit(sums_of(steps(LINE, 400, noise=0.1)))
    assert found is not None
    assert found.seconds(2_000, 50_000) == pytest.approx(LINE.seconds(2_000, 50_000), rel=0.05)


def test_what_is_served_corrects_what_was_measured() -> None:
    fits = StepFits()
    fits.add_curves([WidthTimes(1, ((Mode.DP, ((1, 21_600), (4_096, 468_000))),))], 1e-6)
    before = fits.line("dp1")
    assert before is not None
    assert before.seconds(4_096, 0) == pytest.approx(0.468, rel=0.02)
    assert before.context_s == pytest.approx(21.6e-9, rel=0.2), "the guess, until it is known"
    slower = StepLine(0.03, 0.00015, 2e-7)
    for _ in range(20):
        fits.add_steps([ServedSteps(Mode.DP, 1, sums_of(steps(slower, 200)))])
    after = fits.line("dp1")
    assert after is not None
    assert after.seconds(2_000, 50_000) == pytest.approx(slower.seconds(2_000, 50_000), rel=0.05)
    assert fits.line("tp2") is None


@pytest.mark.parametrize(
    ("factor", "is_scaled"), [(0.7, True), (0.9, False), (1.1, False), (1.4, True)]
)
def test_curves_that_are_far_off_are_scaled_to_the_served_steps(
    factor: float, is_scaled: bool
) -> None:
    """Steps of a few tokens say how long one of 4,096 takes, if all were measured too slow."""
    curve = tuple((tokens, round(LINE.seconds(tokens, 0) * 1e6)) for tokens in (1, 64, 4_096))
    fits = StepFits()
    fits.add_curves([WidthTimes(1, ((Mode.DP, curve),))])
    real = StepLine(LINE.base_s / factor, LINE.token_s / factor, 0.0)
    served = sums_of((tokens, 0.0, real.seconds(tokens, 0)) for tokens in range(1, 51))
    fits.add_steps([ServedSteps(Mode.DP, 1, served)])
    found = fits.line("dp1")
    assert found is not None
    # The line does not agree with LINE in both parts, as contexts are not served.
    wanted = real if is_scaled else LINE
    assert found.seconds(4_096, 0) == pytest.approx(wanted.seconds(4_096, 0), rel=0.1)


def test_scaled_sums_are_those_of_longer_steps() -> None:
    sums = sums_of(steps(LINE, 10))
    longer = sums_of([(t, c, 1.5 * y) for t, c, y in steps(LINE, 10)])
    for name in StepSums.__struct_fields__:
        assert getattr(scaled(sums, 1.5), name) == pytest.approx(getattr(longer, name)), name
    assert mean_ratio(LINE, sums) == pytest.approx(1.0)
    assert mean_ratio(LINE, longer) == pytest.approx(1 / 1.5)


def test_old_steps_are_forgotten() -> None:
    sums = plus(sums_of(steps(LINE, 10)), StepSums(), keep=0.5)
    assert sums.steps == pytest.approx(5.0)


def test_step_times_are_read_from_a_file() -> None:
    lines = parse_step_times(
        {
            "dp1": {"points": [[1, 21.6], [4096, 468]], "context_us": 0.08},
            "tp2": {"points": [[1, 9]]},
        }
    )
    assert lines["dp1"].seconds(4_096, 1_000_000) == pytest.approx(0.548, rel=1e-3)
    assert lines["tp2"].seconds(1, 0) == pytest.approx(0.009)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (None, "must map names"),
        ({"dp2": {"points": [[1, 2]]}}, "'dp2' is no mode"),
        ({"tp2": {"points": []}}, "must be a list"),
        ({"tp2": {"points": [[1, -2]]}}, "must be a list"),
        ({"tp2": {"points": [[1, 2]], "contextus": 1}}, "must have 'points'"),
        ({"tp2": {"points": [[1, 2]], "context_us": -1}}, "number of microseconds"),
    ],
)
def test_bad_step_times_are_refused(data: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_step_times(data)


DP_THAT_BORROWS = ((1, 80_000), (64, 80_100), (256, 80_900), (1_024, 93_400), (8_192, 716_000))
"""Measured on two H100s with halves of a 32B model; the step of 256 tokens is at the floor too."""


def fits_of(points: tuple[tuple[int, int], ...], share: float = 0.0) -> StepFits:
    fits = StepFits()
    dp = WidthTimes(1, ((Mode.DP, points),), floor_us=((Mode.DP, 80_000),))
    tp = WidthTimes(2, ((Mode.TP, ((1, 14_500), (8_192, 380_000))),))
    fits.add_curves([dp, tp], share)
    return fits


def test_a_line_goes_through_the_steps_above_the_floor() -> None:
    fits = fits_of(DP_THAT_BORROWS)
    line = fits.line("dp1")
    assert line is not None
    assert line.seconds(1_024, 0) == pytest.approx(0.0934, rel=0.01)
    assert line.seconds(8_192, 0) == pytest.approx(0.716, rel=0.01)
    assert line.seconds(64, 0) < 0.02, "what it computes, without its loans"


@pytest.mark.parametrize(
    "points", [((1, 80_000), (2_048, 183_000)), ((1, 80_000), (2_048, 81_000))]
)
def test_with_one_step_above_the_floor_the_line_begins_at_nothing(
    points: tuple[tuple[int, int], ...],
) -> None:
    line = fits_of(points).line("dp1")
    assert line is not None
    assert line.seconds(2_048, 0) == pytest.approx(points[-1][1] / 1e6, rel=0.01)
    assert line.seconds(1_024, 0) == pytest.approx(points[-1][1] / 2e6, rel=0.01)


def test_reading_context_is_estimated_by_groups_that_borrow_nothing() -> None:
    """A rank alone reads twice what each of two does: 29 ms for all weights."""
    line = fits_of(DP_THAT_BORROWS, 1e-6).line("dp1")
    assert line is not None
    assert line.context_s == pytest.approx(29e-9, rel=0.2)


def test_a_step_that_borrows_takes_at_least_its_floor() -> None:
    line, sp = StepLine(0.02, 1e-4, 0.0), StepLine(0.03, 5e-5, 0.0)
    dp = GroupCost(line, line, 1_000, floor_s=0.08, prefill_floor_s=0.08)
    assert dp.step_s(1, 0) == pytest.approx(0.08)
    assert dp.step_s(1_000, 0) == pytest.approx(0.12)
    assert dp.rest_s == 0.08
    assert dp.compute_s(100, 0) == pytest.approx(0.03)
    shift = GroupCost(line, sp, 1_000, prefill_floor_s=0.08)
    assert shift.step_s(1, 0) == pytest.approx(0.0201)
    assert shift.step_s(700, 0) == pytest.approx(0.08)
    assert shift.step_s(2_000, 0) == pytest.approx(0.13)
    assert shift.rest_s == 0.02
