"""`GET /admin/usage`: requests and tokens per tenant and tier, by hour or by day."""

import time
from datetime import UTC, datetime
from typing import Any

from coordinator.telemetry.usage_history import HOURS_MAX, By, UsageHistory

DAYS_DEFAULT = 31
ROWS_MAX = 100_000
"""Rows in one answer, at most; the newest ones."""


def usage_view(
    usage: UsageHistory, since_s: float, by: By, last: int | None, tenant: str | None
) -> dict[str, Any]:
    """Return the body of the answer; `since_s` is the coordinator's start in Unix seconds."""
    periods = last or (HOURS_MAX if by == "hour" else DAYS_DEFAULT)
    rows = list(usage.rows(by, periods, tenant, time.time()))
    return {
        "by": by,
        "since": _of_day(since_s),
        "is_cut": len(rows) > ROWS_MAX,
        "usage": [
            {"begin": _of_day(row.begin_s), "tenant": row.tenant, "tier": row.tier, **row.counts}
            for row in rows[-ROWS_MAX:]
        ],
    }


def _of_day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
