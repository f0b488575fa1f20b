"""The last minutes of a cell, one sample per second, for the live page and `aileron status`.

A sample holds only numbers and short texts, so a quarter of an hour of 64 ranks is some 300 kB.
Quantiles cover the last `WINDOW_SAMPLES` samples. Called at intervals with the core's views. Pure.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.protocol.metrics_wire import ITL, SLO_GOOD, SLO_TOTAL, TOKENS, TTFT, Measure, Tally
from coordinator.protocol.metrics_wire import quantile as histogram_quantile
from coordinator.protocol.terms import Tier
from coordinator.telemetry.exposition import oldest_s

INTERVAL_S = 1.0
SAMPLES_MAX = 900
WINDOW_SAMPLES = 10
SHARES = (0.5, 0.99)
TIERS = tuple(tier.name.lower() for tier in Tier)

View = Mapping[str, Any]
_Counts = dict[tuple[str, str], tuple[float, ...]]

STATES = {"serve": "s", "park": "p", "move": "m", "swap": "w"}
AWAY, STARTING = "x", "-"
"""One letter for each rank of a sample."""


class History:
    """The samples, oldest first; each has a number that only grows."""

    def __init__(self, tally: Tally) -> None:
        """`tally` holds the gateways' measurements."""
        self._tally = tally
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES_MAX)
        self._counted: deque[_Counts] = deque(maxlen=WINDOW_SAMPLES + 1)
        self._number = 0

    def take(
        self, layout: View, ranks: Iterable[View], queue: View, *, now_ms: int, wall_s: float
    ) -> None:
        """Take a sample; `wall_s` is the time of day."""
        self._number += 1
        self._counted.append(_counts(self._tally))
        groups = layout["groups"]
        pages_total = sum(group["pages_total"] * group["width"] for group in groups)
        pages_free = sum(group["pages_free"] * group["width"] for group in groups)
        tiers = queue["tiers"]
        self._samples.append(
            {
                "n": self._number,
                "t": round(wall_s, 3),
                "layout": layout["layout"],
                "target": layout["target"],
                "epoch": layout["epoch"],
                "serving": layout["serving"],
                "ranks": "".join(map(_letter, ranks)),
                "placed": [tiers[tier]["placed"] for tier in TIERS],
                "queued": [tiers[tier]["queued"] for tier in TIERS],
                "oldest_s": [round(oldest_s(tiers[tier], now_ms), 3) for tier in TIERS],
                "pages": [pages_total - pages_free, pages_total],
                "tokens_per_s": self._rate(TOKENS),
                "ttft_ms": [self._quantiles(TTFT, tier) for tier in TIERS],
                "tpot_ms": [self._quantiles(ITL, tier) for tier in TIERS],
                "slo": [self._attained(tier) for tier in TIERS],
            }
        )

    def after(self, number: int) -> list[dict[str, Any]]:
        """Return the samples after `number`; all of them if that number is from another process."""
        if number > self._number:
            number = 0
        newer = min(self._number - number, len(self._samples))
        return list(self._samples)[len(self._samples) - newer :]

    def _grown(self, name: str, tier: str) -> list[float]:
        new = self._counted[-1].get((name, tier), ())
        old = self._counted[0].get((name, tier), (0.0,) * len(new))
        return [a - b for a, b in zip(new, old, strict=True)]

    def _rate(self, measure: Measure) -> float:
        seconds = max(1, len(self._counted) - 1) * INTERVAL_S
        return round(sum(sum(self._grown(measure.name, tier)) for tier in TIERS) / seconds, 1)

    def _quantiles(self, measure: Measure, tier: str) -> list[float | None]:
        counts = [int(each) for each in self._grown(measure.name, tier)]
        found = [histogram_quantile(measure.bounds, counts, share) for share in SHARES]
        return [None if each is None else round(each * 1_000, 2) for each in found]

    def _attained(self, tier: str) -> float | None:
        """Return the share of tasks that met their objective since the cell's start."""
        (total,) = self._counted[-1].get((SLO_TOTAL.name, tier), (0.0,))
        (good,) = self._counted[-1].get((SLO_GOOD.name, tier), (0.0,))
        return round(good / total, 4) if total else None


def _counts(tally: Tally) -> _Counts:
    """Sum the measures of a sample over all labels but the tier."""
    found: _Counts = {}
    for measure in (TTFT, ITL, TOKENS, SLO_TOTAL, SLO_GOOD):
        for labels, growing in tally.series_of(measure).items():
            key = measure.name, labels[measure.labels.index("tier")]
            numbers = tuple(map(float, growing.counts)) or (growing.value,)
            before = found.get(key, (0.0,) * len(numbers))
            found[key] = tuple(a + b for a, b in zip(before, numbers, strict=True))
    return found


def _letter(rank: View) -> str:
    if rank["available"] or rank["phase"].startswith("never"):
        return STATES.get(rank["phase"], STARTING)
    return AWAY
