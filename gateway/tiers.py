"""Which tier a request belongs to, and how a tier travels through vLLM's front end.

vLLM hands a request's `priority` from its HTTP header `X-Vllm-Priority` to the engine request.
The gateway alone sets that header, so the relay can read the tier from the priority. Pure.
"""

from typing import Final

import msgspec

from coordinator.protocol.messages import Tier
from gateway.errors import ApiError, api_error

TIER_HEADER = "x-priority-tier"
VLLM_PRIORITY_HEADER = "x-vllm-priority"
VLLM_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority")
"""The values of `service_tier` that vLLM itself accepts."""

PRIORITY_OF_TIER: Final[dict[Tier, int]] = {
    Tier.INTERACTIVE: -10,
    Tier.STANDARD: 0,
    Tier.BATCH: 10,
}
"""vLLM's priority, lower first, with room in between for what vLLM may add."""

_TIER_OF_NAME: Final[dict[str, Tier]] = {tier.name.lower(): tier for tier in Tier}
_TIER_OF_SERVICE_TIER: Final[dict[str, Tier]] = {
    "priority": Tier.INTERACTIVE,
    "fast": Tier.INTERACTIVE,
    "scale": Tier.INTERACTIVE,
    "auto": Tier.STANDARD,
    "default": Tier.STANDARD,
    "flex": Tier.BATCH,
}


def tier_name(tier: Tier) -> str:
    """Name of a tier on the API."""
    return tier.name.lower()


def tier_of_priority(priority: int) -> Tier:
    """Tier of an engine request; a priority that the gateway did not set counts as standard."""
    for tier, value in PRIORITY_OF_TIER.items():
        if value == priority:
            return tier
    return Tier.STANDARD


def tier_of_header(value: str) -> Tier | ApiError:
    """Read `X-Priority-Tier`."""
    tier = _TIER_OF_NAME.get(value.strip().lower())
    if tier is None:
        names = ", ".join(_TIER_OF_NAME)
        return api_error("invalid_value", f"X-Priority-Tier must be one of: {names}.", TIER_HEADER)
    return tier


class _ServiceTier(msgspec.Struct):
    service_tier: object = None


def tier_of_body(body: bytes) -> tuple[Tier, bytes] | ApiError:
    """Read `service_tier`; also return the body with the value put into words that vLLM knows.

    A body that is not a JSON object is left for vLLM to refuse.
    """
    if b'"service_tier"' not in body:
        return Tier.STANDARD, body
    try:
        value = msgspec.json.decode(body, type=_ServiceTier).service_tier
    except msgspec.MsgspecError:
        return Tier.STANDARD, body
    if value is None:
        return Tier.STANDARD, body
    tier = _TIER_OF_SERVICE_TIER.get(value) if isinstance(value, str) else None
    if tier is None:
        names = ", ".join(_TIER_OF_SERVICE_TIER)
        return api_error("invalid_value", f"service_tier must be one of: {names}.", "service_tier")
    if value not in VLLM_SERVICE_TIERS:
        fields = msgspec.json.decode(body)
        body = msgspec.json.encode({**fields, "service_tier": "priority"})
    return tier, body
