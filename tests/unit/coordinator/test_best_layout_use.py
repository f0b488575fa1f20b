"""How much of its best layout a cell is asked for: predicted by the policy, told as a metric."""

from typing import Any

import pytest

from coordinator.core.views import decision_view
from coordinator.policy.decide import Verdict
from coordinator.policy.explain import recorded
from coordinator.protocol.terms import Carry, Tier
from coordinator.telemetry.exposition import use_metrics
from tests.harness.coordinator.policy import observation, tier, verdict


def told(*found: Verdict) -> list[float]:
    views = [decision_view(recorded(each, Carry.RESHARD, 0)) for each in found]
    (family,) = use_metrics({"decisions": views})
    assert family.name == "aileron_best_layout_use_ratio"
    return [sample.value for sample in family.samples]


def busy(rate: float, layout: str = "tp4") -> Verdict:
    seen = tier(Tier.STANDARD, rate=rate, rate_age_s=15.0)
    return verdict(observation(layout, seen))


def test_it_grows_with_the_requests_and_not_with_the_layout_that_serves() -> None:
    ((little,), (much,), (elsewhere,)) = told(busy(4)), told(busy(8)), told(busy(8, "dp4"))
    assert 0 < little < much
    assert much == pytest.approx(2 * little, rel=0.05), "rates add up"
    assert elsewhere == pytest.approx(much, rel=0.05)


def test_the_best_layout_counts() -> None:
    found = busy(8)
    uses = [each.score.use for each in found.candidates if not each.score.refused]
    assert len(uses) > 1
    assert told(found) == [pytest.approx(min(uses), abs=0.001)]
    assert max(uses) > 1.2 * min(uses), "the test says nothing if all layouts can do the same"


def test_one_that_falls_behind_in_every_layout_is_over_one() -> None:
    assert told(busy(5_000))[0] > 1


def test_it_is_told_while_an_operator_s_layout_is_left_alone() -> None:
    seen = observation("tp4", tier(Tier.STANDARD, rate=8, rate_age_s=15.0), pinned_ms=60_000)
    found = verdict(seen)
    assert not found.changes
    assert "operator" in found.reason
    assert told(found) == told(busy(8))


def test_what_an_operator_asked_for_hides_nothing() -> None:
    views = [decision_view(recorded(busy(8), Carry.RESHARD, 0)), {"candidates": []}]
    (family,) = use_metrics({"decisions": views})
    assert [sample.value for sample in family.samples] == told(busy(8))


@pytest.mark.parametrize("decisions", [[], [{"candidates": []}]])
def test_nothing_is_told_where_nothing_was_predicted(decisions: list[dict[str, Any]]) -> None:
    (family,) = use_metrics({"decisions": decisions})
    assert family.samples == []
