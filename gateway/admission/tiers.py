"""Which tier a request belongs to, and how a tier travels through vLLM's front end.

vLLM copies a request's `priority` from its HTTP header `X-Vllm-Priority` to the engine request.
Only the gateway sets that header, so the relay can read the tier from the priority. Pure.
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
"""Headers of inference gateways in front; a configured objective maps to a tier."""
VLLM_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority")
"""The values of `service_tier` that vLLM itself accepts."""

PRIORITY_OF_TIER: Final[dict[Tier, int]] = {
    Tier.INTERACTIVE: -10,
    Tier.STANDARD: 0,
    Tier.BATCH: 10,
}
"""vLLM's priority, lower first, with gaps for values that vLLM may add."""

_TIER_OF_NAME: Final[dict[str, Tier]] = {tier.name.lower(): tier for tier in Tier}
AUTO: Final = "auto"
"""OpenAI's `service_tier` that leaves the choice to the server, as one that is left out."""
_TIER_OF_SERVICE_TIER: Final[dict[str, Tier]] = {
    "priority": Tier.INTERACTIVE,
    "fast": Tier.INTERACTIVE,
    "scale": Tier.INTERACTIVE,
    "default": Tier.STANDARD,
    "flex": Tier.BATCH,
}


_SERVICE_TIER_OF_TIER: Final[dict[Tier, str]] = {
    Tier.INTERACTIVE: "priority",
    Tier.STANDARD: "default",
    Tier.BATCH: "flex",
}


def tier_name(tier: Tier) -> str:
    """Return a tier's name on the API."""
    return tier.name.lower()


def tier_of_priority(priority: int) -> Tier:
    """Return the tier of an engine request; an unknown priority counts as standard."""
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
    if value is None or value == AUTO:
        return None
    tier = _TIER_OF_SERVICE_TIER.get(value) if isinstance(value, str) else None
    if tier is None:
        names = ", ".join((AUTO, *_TIER_OF_SERVICE_TIER))
        return api_error("invalid_value", f"service_tier must be one of: {names}.", "service_tier")
    return tier


@dataclass(frozen=True, slots=True)
class TierRules:
    """The tiers that a client's requests may ask for, and their default."""

    highest: Tier = Tier.INTERACTIVE
    default: Tier = Tier.STANDARD
    objectives: Mapping[str, Tier] = field(default_factory=dict)

    def resolve(self, headers: Mapping[str, str], service_tier: object) -> Tier | ApiError:
        """Return a request's tier: the one it asks for, at most the highest."""
        wanted = self.wanted(headers, service_tier)
        return wanted if isinstance(wanted, ApiError) else max(wanted, self.highest)

    def wanted(self, headers: Mapping[str, str], service_tier: object) -> Tier | ApiError:
        """Return the tier that a request asks for by header, objective or body, or the default.

        The header counts before the objective, the objective before the body; all must be valid.
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
    """Replace a `service_tier` that vLLM does not know yet by one that it knows."""
    if service_tier is None or service_tier in VLLM_SERVICE_TIERS:
        return body
    fields = msgspec.json.decode(body)
    return msgspec.json.encode({**fields, "service_tier": "priority"})


def service_tier_name(tier: Tier) -> str:
    """Return a tier's name in answers, in OpenAI's terms."""
    return _SERVICE_TIER_OF_TIER[tier]
