"""Predictions against what came true, with numbers that were counted by hand."""

import pytest

from coordinator.model.events import Expected, ForecastMade
from coordinator.protocol.metrics_wire import ITL, SLO_GOOD, SLO_TOTAL, TTFT, Family, Tally
from coordinator.telemetry.prediction_tracker import PredictionTracker

HORIZON_MS = 1_000


def foreseen(epoch: int = 1, ttft_s: float = 0.2, tier: str = "interactive") -> ForecastMade:
    return ForecastMade(epoch, HORIZON_MS, (Expected(tier, ttft_s, 0.02, 0.9),))


def counted(prediction_tracker: PredictionTracker, name: str) -> dict[tuple[str, ...], Family]:
    found = {}
    for family in prediction_tracker.tally.families():
        if family.name == name:
            for series in family.series:
                found[series.labels] = Family("", "", (), family.bounds, (series,))
    return found


def ratios(prediction_tracker: PredictionTracker) -> dict[str, float]:
    found = counted(prediction_tracker, "aileron_policy_prediction_ratio")
    return {labels[0]: family.series[0].value for labels, family in found.items()}


def outcomes(prediction_tracker: PredictionTracker) -> dict[str, float]:
    found = counted(prediction_tracker, "aileron_policy_predictions")
    return {labels[0]: family.series[0].value for labels, family in found.items()}


def serve(told: Tally, *, ttft_s: float, tier: str = "interactive", good: int = 1) -> None:
    told.observe(TTFT, ttft_s, tier, "chat")
    told.observe(ITL, 0.01, tier)
    told.observe(ITL, 0.03, tier)
    told.count(SLO_TOTAL, tier)
    told.count(SLO_GOOD, tier, by=good)


def test_only_what_was_observed_within_the_horizon_counts() -> None:
    told = Tally()
    prediction_tracker = PredictionTracker(told)
    serve(told, ttft_s=7.0)
    prediction_tracker.saw_effect(foreseen(), 0)
    serve(told, ttft_s=0.1)
    serve(told, ttft_s=0.3, good=0)
    prediction_tracker.saw_effect(foreseen(ttft_s=99.0), 999)
    assert outcomes(prediction_tracker) == {}
    prediction_tracker.saw_effect(foreseen(ttft_s=0.4), 1_000)
    assert outcomes(prediction_tracker) == {"compared": 1}
    found = ratios(prediction_tracker)
    assert found["time_to_first_token"] == pytest.approx(0.2 / 0.2)
    assert found["time_per_output_token"] == pytest.approx(0.02 / 0.02)
    assert found["attainment"] == pytest.approx(0.9 / 0.5)
    assert prediction_tracker.last["time_to_first_token", "interactive"] == pytest.approx(
        (0.2, 0.2)
    )
    # The next one is followed from there on.
    serve(told, ttft_s=0.1)
    prediction_tracker.saw_effect(foreseen(), 2_000)
    assert prediction_tracker.last["time_to_first_token", "interactive"] == pytest.approx(
        (0.4, 0.1)
    )


def test_a_layout_that_did_not_stay_says_nothing() -> None:
    told = Tally()
    prediction_tracker = PredictionTracker(told)
    prediction_tracker.saw_effect(foreseen(epoch=1), 0)
    serve(told, ttft_s=0.1)
    prediction_tracker.saw_effect(foreseen(epoch=2), 5_000)
    assert outcomes(prediction_tracker) == {"switched": 1}
    assert ratios(prediction_tracker) == {}
    serve(told, ttft_s=0.1)
    prediction_tracker.saw_effect(foreseen(epoch=2), 6_000)
    assert outcomes(prediction_tracker) == {"switched": 1, "compared": 1}
    assert ratios(prediction_tracker)["time_to_first_token"] == pytest.approx(2.0)


def test_idle_tiers_and_lost_objectives_are_no_division_by_zero() -> None:
    told = Tally()
    prediction_tracker = PredictionTracker(told)
    prediction_tracker.saw_effect(foreseen(tier="batch"), 0)
    prediction_tracker.saw_effect(foreseen(tier="interactive"), 1_000)
    assert outcomes(prediction_tracker) == {"idle": 1}
    serve(told, ttft_s=0.1, good=0)
    prediction_tracker.saw_effect(foreseen(), 2_000)
    assert ratios(prediction_tracker)["attainment"] == pytest.approx(90.0)
