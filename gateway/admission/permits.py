"""How many requests a gateway answers at once, by tier; a permit lasts until the last byte.

Lower tiers may use only a share of the permits, so a flood of batch work does not block urgent
requests. A tenant with many permits gets none of the last free ones, so other tenants' requests
still reach the coordinator, which shares each tier fairly. A tenant whose tier was just found full
is refused for a moment without asking the coordinator, before its body and prompt cost any work.
A key may hold at most as many as its `max_parallel`. Called by the edge. Pure.
"""

from collections import Counter
from typing import Final

from coordinator.protocol.keys import ApiKey
from coordinator.protocol.terms import Tier
from gateway.errors import ApiError, api_error

SHARE_OF_TIER: Final[dict[Tier, float]] = {
    Tier.INTERACTIVE: 1.0,
    Tier.STANDARD: 0.9,
    Tier.BATCH: 0.75,
}
"""Share of all permits below which a request of the tier is admitted."""

TENANT_FACTOR: Final = 8
"""Most permits of one tenant, as a multiple of the permits free for its tier, like dynamic
thresholds of switch buffers: alone it gets eight ninths, and a newcomer finds free ones."""

REFUSED_CODE: Final = "queue_full"
REFUSAL_HOLDS_S = 0.1
"""How long a coordinator's refusal applies to further requests of the same tenant and tier."""
REFUSALS_MAX = 4_096
"""Most remembered refusals."""


class Admission:
    """The permits of a gateway."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._held: Counter[str] = Counter()
        """Permits held by each tenant that has any."""
        self._of_key: Counter[str] = Counter()
        """The same by the id of each key."""
        self._all_held = 0

    def __len__(self) -> int:
        """Return the number of held permits."""
        return self._all_held

    def take(self, tier: Tier, tenant: str, key: ApiKey | None = None) -> ApiError | None:
        """Take a permit, to be returned with `give_back`; or return why there is none."""
        if key is not None and key.max_parallel and self._of_key[key.id] >= key.max_parallel:
            text = (
                f"This API key has its {key.max_parallel} requests at once: wait until one ends, "
                "or ask for a higher limit."
            )
            return api_error("parallel_limit_exceeded", text)
        free = max(int(self._requests_max * SHARE_OF_TIER[tier]), 1) - len(self)
        if free <= 0:
            is_full = len(self) >= self._requests_max
            text = "The gateway is at its limit of open requests: try again later."
            return api_error("queue_full" if is_full else "tier_capacity", text)
        if self._held[tenant] >= TENANT_FACTOR * free:
            text = "This client has too many open requests: wait until some have ended."
            return api_error("tier_capacity", text)
        self._held[tenant] += 1
        self._all_held += 1
        if key is not None:
            # Also without a limit: one may be added to the file while this request runs.
            self._of_key[key.id] += 1
        return None

    def give_back(self, tenant: str, key: ApiKey | None = None) -> None:
        """Return a permit, with the arguments with which it was taken."""
        assert self._held[tenant] > 0, "no permit of this tenant is held."
        self._held[tenant] -= 1
        self._all_held -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        if key is not None:
            self._of_key[key.id] -= 1
            if not self._of_key[key.id]:
                del self._of_key[key.id]


class Refusals:
    """Tenants that were just refused because a queue is full.

    By tenant, because the coordinator refuses the tenant with most tasks in the tier's queue: a
    refusal of one tenant does not apply to another.
    """

    def __init__(self) -> None:
        self._until_s: dict[tuple[Tier, str], tuple[float, ApiError]] = {}

    def note(self, tier: Tier, tenant: str, failure: ApiError | None, now_s: float) -> None:
        """Record how a request ended."""
        if failure is None or failure.code != REFUSED_CODE:
            return
        if len(self._until_s) >= REFUSALS_MAX:
            self._until_s = {who: known for who, known in self._until_s.items() if known[0] > now_s}
        if len(self._until_s) < REFUSALS_MAX:
            self._until_s[tier, tenant] = (now_s + REFUSAL_HOLDS_S, failure)

    def find(self, tier: Tier, tenant: str, now_s: float) -> ApiError | None:
        """Return the refusal that still applies to a new request."""
        until_s, failure = self._until_s.get((tier, tenant), (0.0, None))
        return failure if now_s < until_s else None
