"""Service level objectives by tier: limits on TTFT and TPOT, and which requests met them.

Pure. Defaults: 500 ms and 30 ms, as MLPerf's interactive Llama-3.1-8B, for users who wait at the
screen; 2 s and 100 ms for other calls, and any whole answer for batch.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loadgen.errors import UsageError
from loadgen.report.records import RequestRecord, tpot_ms, ttft_ms

DEFAULT_SLOS = "interactive:500ms/30ms,standard:2s/100ms,batch:none"
OTHER_TIERS = "standard"
"""Limits for requests without a tier, or with one that has no limits of its own."""
ALL_TIERS = "*"
SLO_SHAPE = re.compile(r"(?P<tier>[\w.-]+|\*):(?:(?P<ttft>[^/]+)/(?P<tpot>[^/]+)|none)")
TIME_SHAPE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>ms|s)")
UNIT_MS = {"ms": 1.0, "s": 1000.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds; None means that any value is good."""

    ttft_ms: float | None
    tpot_ms: float | None


NO_SLO = Slo(None, None)


@dataclass(frozen=True, slots=True)
class Slos:
    """The limits of each tier; `*` stands for all tiers without an entry."""

    by_tier: Mapping[str, Slo]

    def of(self, tier: str | None) -> Slo:
        """Return the limits of a tier; None is a request without one."""
        names = (tier or OTHER_TIERS, ALL_TIERS, OTHER_TIERS)
        return next((self.by_tier[name] for name in names if name in self.by_tier), NO_SLO)

    def shared(self, tiers: Iterable[str | None]) -> Slo:
        """Return the limits that all of these tiers share, no limits if they differ."""
        found = {self.of(tier) for tier in tiers}
        return next(iter(found)) if len(found) == 1 else NO_SLO


def parse_slos(text: str) -> Slos:
    """Read `interactive:500ms/30ms,batch:none`; other tiers keep the defaults."""
    by_tier: dict[str, Slo] = {} if "*:" in text else dict(_parse(DEFAULT_SLOS))
    given = list(_parse(text)) if text else []
    if len({tier for tier, _ in given}) < len(given):
        raise UsageError(f"--slo '{text}' names a tier twice.")
    return Slos(by_tier | dict(given))


def is_good(record: RequestRecord, slos: Slos) -> bool:
    """Return whether a whole answer met its tier's limits; one token has no TPOT to break."""
    if not record.ok:
        return False
    slo = slos.of(record.planned.tier)
    first_ms, per_token_ms = ttft_ms(record), tpot_ms(record)
    if slo.ttft_ms is not None and (first_ms is None or first_ms > slo.ttft_ms):
        return False
    return slo.tpot_ms is None or per_token_ms is None or per_token_ms <= slo.tpot_ms


def _parse(text: str) -> Iterable[tuple[str, Slo]]:
    for part in text.split(","):
        match = SLO_SHAPE.fullmatch(part.strip())
        if match is None:
            raise _bad(part)
        limits = (match["ttft"], match["tpot"])
        yield match["tier"], Slo(*(_limit_ms(limit, part) for limit in limits))


def _limit_ms(text: str | None, part: str) -> float | None:
    if text in (None, "none"):
        return None
    match = TIME_SHAPE.fullmatch(text or "")
    if match is None or float(match["number"]) == 0:
        raise _bad(part)
    return float(match["number"]) * UNIT_MS[match["unit"]]


def _bad(part: str) -> UsageError:
    return UsageError(
        f"--slo '{part}' does not look like TIER:TTFT/TPOT, for example interactive:500ms/30ms, "
        "standard:2s/none or batch:none."
    )
