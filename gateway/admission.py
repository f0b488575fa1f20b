"""How many requests a gateway answers at once, by tier; a permit is held until the last byte.

The lowest tiers may take a part of the permits only, so that a flood of batch work does not keep
urgent requests out. Called by the edge. Pure.
"""

from collections import Counter
from typing import Final

from coordinator.protocol.messages import Tier
from gateway.errors import ApiError, api_error

SHARE_OF_TIER: Final[dict[Tier, float]] = {
    Tier.INTERACTIVE: 1.0,
    Tier.STANDARD: 0.9,
    Tier.BATCH: 0.75,
}
"""The part of all permits up to which a request of the tier is let in."""


class Admission:
    """The permits of a gateway."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._held: Counter[Tier] = Counter()

    def __len__(self) -> int:
        """Return the number of permits that are held."""
        return self._held.total()

    def take(self, tier: Tier) -> ApiError | None:
        """Take a permit, to be given back with `give_back`; or return why there is none."""
        if len(self) >= max(int(self._requests_max * SHARE_OF_TIER[tier]), 1):
            is_full = len(self) >= self._requests_max
            text = "The gateway answers as many requests as it can at once."
            return api_error("queue_full" if is_full else "tier_capacity", text)
        self._held[tier] += 1
        return None

    def give_back(self, tier: Tier) -> None:
        """Give a permit back."""
        assert self._held[tier] > 0, f"no permit of {tier.name} is held."
        self._held[tier] -= 1
