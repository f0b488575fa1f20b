"""Counts requests and tokens of tenants, for the usage that cells report; pure.

Apart from the metrics, because there may be thousands of series: they travel less often.
"""

from coordinator.protocol.log_config import UsageConfig
from coordinator.protocol.metrics_wire import (
    ANONYMOUS_TENANT,
    OTHER_TENANTS,
    TENANT_CACHED_TOKENS,
    TENANT_OUTPUT_TOKENS,
    TENANT_PROMPT_TOKENS,
    TENANT_REQUESTS,
    Tally,
)
from coordinator.protocol.terms import Tier
from gateway.admission.tiers import tier_name
from gateway.errors import RequestState


class TenantMeter:
    """The usage that one gateway process has counted since its start."""

    def __init__(self, tenants_max: int = UsageConfig().tenants_max) -> None:
        """Count `tenants_max` tenants by name at most."""
        self._tenants: set[str] = set()
        self._tenants_max = tenants_max
        self._cells: dict[str, Tally] = {}
        self.tally = Tally()
        """Usage that no cell computed: refused requests."""

    def by_cell(self) -> list[tuple[str, Tally]]:
        """Return each cell that had requests, with its tally."""
        return list(self._cells.items())

    def forget(self, cell: str) -> None:
        """Drop the tally of a cell that is gone for good; it was published already."""
        self._cells.pop(cell, None)

    def used(self, tenant: str, tier: Tier, request: RequestState) -> None:
        """Add an answer that has ended to its tenant's usage, in the cell that computed it."""
        labels = self._name_of(tenant), tier_name(tier)
        tally = self._cells.setdefault(request.cell, Tally()) if request.cell else self.tally
        tally.count(TENANT_REQUESTS, *labels)
        # A request that was refused, or left the queue, cost no computation of its prompt.
        is_computed = request.first_token_at_s > 0
        tally.count(TENANT_PROMPT_TOKENS, *labels, by=request.prompt_tokens * is_computed)
        tally.count(TENANT_CACHED_TOKENS, *labels, by=request.cached_tokens * is_computed)
        tally.count(TENANT_OUTPUT_TOKENS, *labels, by=request.output_tokens)

    def _name_of(self, tenant: str) -> str:
        name = tenant or ANONYMOUS_TENANT
        if name in self._tenants:
            return name
        if len(self._tenants) >= self._tenants_max:
            return OTHER_TENANTS
        self._tenants.add(name)
        return name
