"""Compares the adaptive policy's predictions with measurements. Pure.

It follows one prediction at a time: that of the serving layout, over the policy's horizon. Then it
compares the prediction with the gateways' measurements of that time. Gateways publish totals twice
per second, so the measured span has the same length but may lag by half a second. A prediction
whose layout did not stay says nothing and is dropped.
"""

from dataclasses import dataclass
from typing import Final

from coordinator.model.events import Effect, Event, Expected, ForecastMade
from coordinator.protocol.metrics_wire import ITL, SLO_GOOD, SLO_TOTAL, TTFT, Measure, Tally

TTFT_NAME, TPOT_NAME, ATTAINMENT = "time_to_first_token", "time_per_output_token", "attainment"

RATIO_BOUNDS: Final = (
    *(0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0),
)
LEAST: Final = 0.01
"""Smaller shares are raised to this: the ratio needs a divisor."""

RATIO: Final = Measure(
    "aileron_policy_prediction_ratio",
    "Ratio of the adaptive policy's prediction for the serving layout to the observation.",
    ("measure", "tier"),
    RATIO_BOUNDS,
)
PREDICTIONS: Final = Measure(
    "aileron_policy_predictions",
    "Predictions of the adaptive policy, by outcome of their comparison.",
    ("outcome",),
)


@dataclass(frozen=True, slots=True)
class _Totals:
    """The gateways' totals of a tier at one time: sums and counts."""

    ttft: tuple[float, int]
    pauses: tuple[float, int]
    good: float
    total: float


@dataclass(frozen=True, slots=True)
class _Prediction:
    forecast: ForecastMade
    until_ms: int
    before: dict[str, _Totals]


class PredictionTracker:
    """Follows predictions; `measurements` holds the gateways' measurements."""

    def __init__(self, measurements: Tally) -> None:
        self._measurements = measurements
        self._prediction: _Prediction | None = None
        self.tally = Tally()
        self.last: dict[tuple[str, str], tuple[float, float]] = {}
        """(measure, tier) -> the last predicted and observed values, in seconds."""

    def saw_event(self, event: Event, now_ms: int) -> None:
        """Ignore events: they do not concern predictions."""

    def saw_effect(self, effect: Effect, now_ms: int) -> None:
        """Compare the followed prediction once its time is over, and follow the next one."""
        if not isinstance(effect, ForecastMade):
            return
        prediction = self._prediction
        if prediction is not None and prediction.forecast.epoch != effect.epoch:
            self.tally.count(PREDICTIONS, "switched")
            prediction = None
        elif prediction is not None and now_ms >= prediction.until_ms:
            compared = [self._compare(each, prediction) for each in prediction.forecast.tiers]
            self.tally.count(PREDICTIONS, "compared" if any(compared) else "idle")
            prediction = None
        if prediction is None:
            tiers = [each.tier for each in effect.tiers]
            until_ms = now_ms + effect.horizon_ms
            prediction = _Prediction(effect, until_ms, {tier: self._totals(tier) for tier in tiers})
        self._prediction = prediction

    def _compare(self, expected: Expected, prediction: _Prediction) -> bool:
        """Compare the prediction for a tier; False if nothing was observed."""
        before, now = prediction.before[expected.tier], self._totals(expected.tier)
        for name, predicted_s, old, new in (
            (TTFT_NAME, expected.ttft_s, before.ttft, now.ttft),
            (TPOT_NAME, expected.tpot_s, before.pauses, now.pauses),
        ):
            observed_s = _mean(old, new)
            if observed_s > 0:
                self.last[name, expected.tier] = (predicted_s, observed_s)
                self.tally.observe(RATIO, predicted_s / observed_s, name, expected.tier)
        if total := now.total - before.total:
            share = (now.good - before.good) / total
            ratio = max(expected.attainment, LEAST) / max(share, LEAST)
            self.tally.observe(RATIO, ratio, ATTAINMENT, expected.tier)
        return now != before

    def _totals(self, tier: str) -> _Totals:
        return _Totals(
            ttft=self._sum(TTFT, tier),
            pauses=self._sum(ITL, tier),
            good=self._sum(SLO_GOOD, tier)[0],
            total=self._sum(SLO_TOTAL, tier)[0],
        )

    def _sum(self, measure: Measure, tier: str) -> tuple[float, int]:
        at = measure.labels.index("tier")
        series = self._measurements.series_of(measure).items()
        of_tier = [each for labels, each in series if labels[at] == tier]
        return sum(each.value for each in of_tier), sum(sum(each.counts) for each in of_tier)


def _mean(old: tuple[float, int], new: tuple[float, int]) -> float:
    """Return the mean of the values between two totals; 0 if there are none."""
    count = new[1] - old[1]
    return (new[0] - old[0]) / count if count > 0 else 0.0
