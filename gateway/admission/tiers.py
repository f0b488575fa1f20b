"""Which tier a request belongs to, and how a tier travels through vLLM's front end.

vLLM hands a request's `priority` from its HTTP header `X-Vllm-Priority` to the engine request.
The gateway alone sets that header, so the relay can read the tier from the priority. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from coordinator.protocol.terms import Tier
from gateway.errors import ApiError, api_error

TIER_HEADER = "x-priority-tier"
VLLM_PRIORITY_HEADER = "x-vllm-priority"
OBJECTIVE_HEADERS = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
"""Headers of inference gateways in front; a configured name stands for a tier."""
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


_SERVICE_TIER_OF_TIER: Final[dict[Tier, str]] = {
    Tier.INTERACTIVE: "priority",
    Tier.STANDARD: "default",
    Tier.BATCH: "flex",
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


def tier_of_service_tier(value: object) -> Tier | ApiError | None:
    """Read a body's `service_tier`; None if it names none."""
    if value is None:
        return None
    tier = _TIER_OF_SERVICE_TIER.get(value) if isinstance(value, str) else None
    if tier is None:
        names = ", ".join(_TIER_OF_SERVICE_TIER)
        return api_error("invalid_value", f"service_tier must be one of: {names}.", "service_tier")
    return tier


@dataclass(frozen=True, slots=True)
class TierRules:
    """What a client's requests may ask for, and what they get if they ask for nothing."""

    highest: Tier = Tier.INTERACTIVE
    default: Tier = Tier.STANDARD
    objectives: Mapping[str, Tier] = field(default_factory=dict)

    def resolve(self, headers: Mapping[str, str], service_tier: object) -> Tier | ApiError:
        """Return a request's tier: the one it asks for, but never one above the highest."""
        wanted = self.wanted(headers, service_tier)
        return wanted if isinstance(wanted, ApiError) else max(wanted, self.highest)

    def wanted(self, headers: Mapping[str, str], service_tier: object) -> Tier | ApiError:
        """Return the tier that a request asks for by header, objective or body, or the default.

        Whatever decides, the others must be valid all the same.
        """
        wanted: Tier | ApiError | None = tier_of_service_tier(service_tier)
        for name in OBJECTIVE_HEADERS:
            if isinstance(wanted, ApiError) or name not in headers or not self.objectives:
                continue
            wanted = self.objectives.get(headers[name].strip())
            if wanted is None:
                text = f"{name} must be one of: {', '.join(sorted(self.objectives))}."
                return api_error("invalid_value", text, name)
        if not isinstance(wanted, ApiError) and TIER_HEADER in headers:
            wanted = tier_of_header(headers[TIER_HEADER])
        return self.default if wanted is None else wanted


def reword_service_tier(body: bytes, service_tier: object) -> bytes:
    """Put a `service_tier` that is newer than vLLM into words that it knows."""
    if service_tier is None or service_tier in VLLM_SERVICE_TIERS:
        return body
    fields = msgspec.json.decode(body)
    return msgspec.json.encode({**fields, "service_tier": "priority"})


def service_tier_name(tier: Tier) -> str:
    """Name of a tier in answers, in OpenAI's words."""
    return _SERVICE_TIER_OF_TIER[tier]
