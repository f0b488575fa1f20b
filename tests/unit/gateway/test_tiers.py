"""Where a tier comes from, and that vLLM's priority brings it back."""

import msgspec
import pytest

from coordinator.protocol.messages import Tier
from gateway.errors import ApiError
from gateway.tiers import (
    PRIORITY_OF_TIER,
    tier_name,
    tier_of_body,
    tier_of_header,
    tier_of_priority,
)


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
        ("scale", Tier.INTERACTIVE),
        ("auto", Tier.STANDARD),
        ("default", Tier.STANDARD),
        ("flex", Tier.BATCH),
        (None, Tier.STANDARD),
    ],
)
def test_service_tier(value: str | None, tier: Tier) -> None:
    body = msgspec.json.encode({"service_tier": value, "prompt": "x"})
    assert tier_of_body(body) == (tier, body)


def test_service_tier_that_vllm_does_not_know_is_reworded() -> None:
    resolved = tier_of_body(b'{"prompt": "x", "service_tier": "fast"}')
    assert not isinstance(resolved, ApiError)
    tier, body = resolved
    assert tier is Tier.INTERACTIVE
    assert msgspec.json.decode(body) == {"prompt": "x", "service_tier": "priority"}


@pytest.mark.parametrize("value", ["gold", 3, ["flex"]])
def test_unknown_service_tier_is_refused(value: object) -> None:
    error = tier_of_body(msgspec.json.encode({"service_tier": value}))
    assert isinstance(error, ApiError)
    assert (error.status, error.param) == (400, "service_tier")


@pytest.mark.parametrize("body", [b"", b"{}", b'"service_tier"', b'{"service_tier": ', b'{"a": 1}'])
def test_body_without_service_tier_is_standard(body: bytes) -> None:
    assert tier_of_body(body) == (Tier.STANDARD, body)
