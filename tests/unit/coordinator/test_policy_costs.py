"""Step times: fits of lines, what served steps change, files of them."""

import random

import pytest

from comm_pool.layout import Mode
from coordinator.model.cost_model import StepFits
from coordinator.model.step_line import StepLine, fit, plus, sums_of
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
    before = fits.line(Mode.DP, 1)
    assert before is not None
    assert before.seconds(4_096, 0) == pytest.approx(0.468, rel=0.02)
    assert before.context_s == pytest.approx(21.6e-9, rel=0.2), "the guess, until it is known"
    slower = StepLine(0.03, 0.00015, 2e-7)
    for _ in range(20):
        fits.add_steps([ServedSteps(Mode.DP, 1, sums_of(steps(slower, 200)))])
    after = fits.line(Mode.DP, 1)
    assert after is not None
    assert after.seconds(2_000, 50_000) == pytest.approx(slower.seconds(2_000, 50_000), rel=0.05)
    assert fits.line(Mode.TP, 2) is None


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
