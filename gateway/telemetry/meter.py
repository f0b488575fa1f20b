"""Measures a gateway's requests and streams.

The relay reports tokens as it hands them to the front end: TTFT, pauses and objectives count for
the stream's cell at that time. The edge reports requests as their answers end. Labels are tiers,
listed routes, status codes and known error codes, never client text. Called by the relay and the
edge with their clock's time in seconds; pure.
"""

import math
from collections.abc import Mapping

from coordinator.protocol.log_config import UsageConfig
from coordinator.protocol.metrics_wire import (
    CELL_MOVES,
    CHAT,
    CLIENT_RETRIES,
    DISCONNECTS,
    DURATION,
    ITL,
    REGISTRY_AWAY,
    REJECTIONS,
    REQUESTS,
    SLO_GOOD,
    SLO_TOTAL,
    STORAGE_AWAY,
    TEXT,
    TIER_CLAMPED,
    TOKENS,
    TPOT,
    TTFT,
    Family,
    Tally,
)
from coordinator.protocol.policy_config import SloTarget
from coordinator.protocol.terms import TaskId, Tier
from gateway.admission.tiers import tier_name
from gateway.errors import CODES
from gateway.fleet.roster import MoveReason
from gateway.open_requests import OpenRequest, family
from gateway.telemetry.tenant_meter import TenantMeter

CLIENT_GONE_STATUS = 499
"""nginx's status for a request whose client left."""

OPERATION_OF_ROUTE = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": CHAT,
    "/v1/messages": CHAT,
    "/v1/completions": TEXT,
}
STATUSES = (200, 400, 429, CLIENT_GONE_STATUS, 500, 503)
"""Statuses of these routes whose series exist from the start; others appear when they occur."""

OTHER_REASON = "other"
_CHAT_PREFIXES = ("chatcmpl-", "resp_")
"""Prefixes of vLLM's ids of chat requests and responses."""


class RequestMeter:
    """Counts and times of one gateway process since its start."""

    def __init__(
        self,
        targets: Mapping[Tier, SloTarget] | None = None,
        tenants_max: int = UsageConfig().tenants_max,
    ) -> None:
        """Check tasks against these objectives; ignore tiers without one."""
        self.targets = targets or {}
        self.tenants = TenantMeter(tenants_max)
        self._cells: dict[str, Tally] = {}
        self.tally = Tally()
        """Measures that belong to no cell."""
        # Present from the start with 0, so that the first increase is visible.
        self.tally.begin(TIER_CLAMPED, STORAGE_AWAY, REGISTRY_AWAY)
        for reason in MoveReason:
            self.tally.count(CELL_MOVES, reason, by=0)
        for name in map(tier_name, Tier):
            for code in (*sorted(CODES), OTHER_REASON):
                self.tally.count(REJECTIONS, code, name, by=0)
            for route in OPERATION_OF_ROUTE:
                for status in STATUSES:
                    self.tally.count(REQUESTS, route, name, str(status), by=0)

    def of(self, cell: str | None) -> Tally:
        """Return the tally for streams of a cell, or of none."""
        return self.tally if cell is None else self._cells.setdefault(cell, Tally())

    def requests(self) -> Family:
        """Return the answered requests by route, tier and code."""
        return next(each for each in self.tally.families() if each.name == REQUESTS.name)

    def by_cell(self) -> list[tuple[str, Tally]]:
        """Return each cell that had streams, with its tally."""
        return list(self._cells.items())

    def forget(self, cell: str) -> None:
        """Drop the tally of a cell that is gone for good; it was published already."""
        self._cells.pop(cell, None)

    def tokens(self, task: OpenRequest, count: int, now_s: float) -> None:
        """Measure tokens about to be handed to the front end, after those in `task.delivered`."""
        tier, tally = tier_name(task.header.tier), self.of(task.cell)
        tally.count(TOKENS, tier, by=count)
        if task.delivered:
            tally.observe(ITL, now_s - task.last_token_at_s, tier)
            return
        task.first_token_at_s = now_s
        tally.observe(TTFT, now_s - task.opened_at_s, tier, _operation(task))

    def ended(self, task: OpenRequest, now_s: float, *, failed: bool = False) -> None:
        """Judge a task that finished, failed or was cancelled.

        vLLM ends a stream at a stop string as it ends one whose client left, so a stream with
        tokens is judged by its tokens. One without tokens is judged only if it failed or its first
        token is late.
        """
        tier, tally = tier_name(task.header.tier), self.of(task.cell)
        count = len(task.delivered)
        if count > 1:
            tally.observe(TPOT, _mean_s(task), tier, _operation(task))
        target = self.targets.get(task.header.tier)
        if target is None:
            return
        ttft_ms, tpot_ms = target.ttft_ms or math.inf, target.tpot_ms or math.inf
        waited_ms = (now_s - task.opened_at_s) * 1_000
        if not (count or failed or waited_ms > ttft_ms):
            return
        is_good = (
            not failed
            and count > 0
            and (task.first_token_at_s - task.opened_at_s) * 1_000 <= ttft_ms
            and (count == 1 or _mean_s(task) * 1_000 <= tpot_ms)
        )
        tally.count(SLO_TOTAL, tier)
        tally.count(SLO_GOOD, tier, by=is_good)

    def answered(self, route: str, tier: Tier, status: int, reason: str, took_s: float) -> None:
        """Count an answer that has ended; `reason` is its error's code, or empty.

        Probes are not counted: an operator's polling says nothing about clients.
        """
        name = tier_name(tier)
        self.tally.count(REQUESTS, route, name, str(status))
        if status == CLIENT_GONE_STATUS:
            self.tally.count(DISCONNECTS, name)
        elif reason:
            self.tally.count(REJECTIONS, reason if reason in CODES else OTHER_REASON, name)
        elif status == 200 and route in OPERATION_OF_ROUTE:
            self.tally.observe(DURATION, took_s, name, OPERATION_OF_ROUTE[route])

    def retried(self, tier: Tier) -> None:
        """Count an answer to a request that its client marked as a retry."""
        self.tally.count(CLIENT_RETRIES, tier_name(tier))

    def clamped(self, tier: Tier) -> None:
        """Count a request that asked for a higher tier than it got."""
        self.tally.count(TIER_CLAMPED, tier_name(tier))

    def moved(self, reason: MoveReason) -> None:
        """Count a task that continues in another cell."""
        self.tally.count(CELL_MOVES, reason)

    def storage_away(self) -> None:
        """Count that the Redis which gateways share did not answer."""
        self.tally.count(STORAGE_AWAY)

    def registry_away(self) -> None:
        """Count that the registry of cells did not answer."""
        self.tally.count(REGISTRY_AWAY)


def operation_of(task: TaskId) -> str:
    """Return the operation of a task's request, as OpenTelemetry names it."""
    return CHAT if family(task).startswith(_CHAT_PREFIXES) else TEXT


def _operation(task: OpenRequest) -> str:
    return operation_of(task.id)


def _mean_s(task: OpenRequest) -> float:
    return (task.last_token_at_s - task.first_token_at_s) / (len(task.delivered) - 1)
