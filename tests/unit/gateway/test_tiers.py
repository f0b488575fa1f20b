"""Where a tier comes from, and that vLLM's priority brings it back."""

import msgspec
import pytest

from coordinator.protocol.terms import Tier
from gateway.admission.tiers import (
    PRIORITY_OF_TIER,
    TierRules,
    reword_service_tier,
    tier_name,
    tier_of_header,
    tier_of_priority,
    tier_of_service_tier,
)
from gateway.errors import ApiError


@pytest.mark.parametrize("tier", list(Tier))
def test_tier_survives_vllm_s_priority(tier: Tier) -> None:
    assert tier_of_priority(PRIORITY_OF_TIER[tier]) is tier


def test_more_urgent_tiers_have_lower_priorities() -> None:
    priorities = [PRIORITY_OF_TIER[tier] for tier in sorted(Tier)]
    assert priorities == sorted(priorities)


def test_other_priorities_are_standard() -> None:
    assert tier_of_priority(-3) is Tier.STANDARD


@pytest.mark.parametrize("tier", list(Tier))
def test_header_names_a_tier(tier: Tier) -> None:
    assert tier_of_header(f" {tier_name(tier).upper()} ") is tier


def test_unknown_header_is_refused() -> None:
    error = tier_of_header("system")
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (400, "invalid_value")
    assert "interactive, standard, batch" in error.message


@pytest.mark.parametrize(
    ("value", "tier"),
    [
        ("priority", Tier.INTERACTIVE),
        ("fast", Tier.INTERACTIVE),
        ("scale", Tier.INTERACTIVE),
        ("auto", None),
        ("default", Tier.STANDARD),
        ("flex", Tier.BATCH),
        (None, None),
    ],
)
def test_service_tier(value: str | None, tier: Tier | None) -> None:
    assert tier_of_service_tier(value) is tier


def test_service_tier_that_vllm_does_not_know_is_reworded() -> None:
    body = b'{"prompt": "x", "service_tier": "fast"}'
    reworded = reword_service_tier(body, "fast")
    assert msgspec.json.decode(reworded) == {"prompt": "x", "service_tier": "priority"}
    assert reword_service_tier(body, "flex") is body


@pytest.mark.parametrize("value", ["gold", 3, ["flex"]])
def test_unknown_service_tier_is_refused(value: object) -> None:
    error = tier_of_service_tier(value)
    assert isinstance(error, ApiError)
    assert (error.status, error.param) == (400, "service_tier")


OBJECTIVES = {"chat": Tier.INTERACTIVE, "night": Tier.BATCH}
OBJECTIVE = "x-gateway-inference-objective"


@pytest.mark.parametrize(
    ("headers", "service_tier", "tier"),
    [
        ({}, None, Tier.STANDARD),
        ({}, "flex", Tier.BATCH),
        ({OBJECTIVE: "chat"}, "flex", Tier.INTERACTIVE),
        ({"x-llm-d-inference-objective": "night"}, None, Tier.BATCH),
        ({"x-priority-tier": "standard", OBJECTIVE: "chat"}, "flex", Tier.STANDARD),
    ],
)
def test_header_objective_body_default_in_that_order(
    headers: dict[str, str], service_tier: str | None, tier: Tier
) -> None:
    assert TierRules(objectives=OBJECTIVES).resolve(headers, service_tier) is tier


@pytest.mark.parametrize("highest", list(Tier))
@pytest.mark.parametrize("wanted", list(Tier))
def test_no_request_gets_above_its_key(highest: Tier, wanted: Tier) -> None:
    rules = TierRules(highest, default=highest)
    assert rules.resolve({"x-priority-tier": tier_name(wanted)}, None) == max(highest, wanted)
    assert rules.resolve({}, None) is highest


def test_unknown_objective_is_refused_and_an_unconfigured_one_ignored() -> None:
    error = TierRules(objectives=OBJECTIVES).resolve({OBJECTIVE: "day"}, None)
    assert isinstance(error, ApiError)
    assert (error.code, error.param) == ("invalid_value", OBJECTIVE)
    assert TierRules().resolve({OBJECTIVE: "day"}, None) is Tier.STANDARD
