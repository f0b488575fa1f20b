"""Names of counters and histograms, and how their totals travel from gateways. Pure.

A gateway publishes totals since its start, not increments: a lost or repeated message does no harm,
and the coordinator adds the growth. No label holds a value that clients choose. TTFT, time per
output token and their buckets follow OpenTelemetry's GenAI conventions.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Final

import msgspec

from coordinator.protocol.terms import Tier

TTFT_BOUNDS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
TPOT_BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0),
)
DURATION_BOUNDS_S: Final = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 655.36),
)

CHAT: Final = "chat"
TEXT: Final = "text_completion"
"""Operations, as OpenTelemetry names them."""

LABEL_VALUES: Final = {
    "tier": tuple(tier.name.lower() for tier in Tier),
    "operation": (CHAT, TEXT),
}
"""Labels whose values are all known: their series exist before anything is measured."""

VLLM_PREFIX: Final = "vllm:"
"""Measures of vLLM's front end in each gateway keep vLLM's names."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One name: a histogram if it has bucket bounds, else a counter (without `_total`)."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    def known_series(self) -> Iterator[tuple[str, ...]]:
        """Yield the labels of all series, if all values of all labels are known."""
        if all(label in LABEL_VALUES for label in self.labels):
            yield from product(*(LABEL_VALUES[label] for label in self.labels))


TTFT: Final = Measure(
    "aileron_time_to_first_token_seconds",
    "From a request's arrival at the relay to the delivery of its first token.",
    ("tier", "operation"),
    TTFT_BOUNDS_S,
)
ITL: Final = Measure(
    "aileron_inter_token_latency_seconds",
    "Pause between two deliveries of tokens to one stream.",
    ("tier",),
    TPOT_BOUNDS_S,
)
TPOT: Final = Measure(
    "aileron_time_per_output_token_seconds",
    "Mean time between the output tokens of one stream, reported at its end.",
    ("tier", "operation"),
    TPOT_BOUNDS_S,
)
DURATION: Final = Measure(
    "aileron_request_duration_seconds",
    "From a request's headers to the last byte of its answer; only complete answers with 200.",
    ("tier", "operation"),
    DURATION_BOUNDS_S,
)
REQUESTS: Final = Measure(
    "aileron_requests",
    "Answered requests; the code 499 means that the client disconnected.",
    ("route", "tier", "code"),
)
REJECTIONS: Final = Measure(
    "aileron_rejections", "Requests that were answered with an error.", ("reason", "tier")
)
DISCONNECTS: Final = Measure(
    "aileron_client_disconnects",
    "Clients that disconnected before their answer was complete.",
    ("tier",),
)
CLIENT_RETRIES: Final = Measure(
    "aileron_client_retries",
    "Answers to requests that a client repeats (`x-stainless-retry-count`).",
    ("tier",),
)
TOKENS: Final = Measure("aileron_delivered_tokens", "Tokens handed to streams.", ("tier",))
SLO_TOTAL: Final = Measure("aileron_slo", "Tasks that count for their tier's objective.", ("tier",))
SLO_GOOD: Final = Measure(
    "aileron_slo_good",
    "Tasks whose first token and mean time per token met their tier's objective.",
    ("tier",),
)

TIER_CLAMPED: Final = Measure(
    "aileron_tier_clamped",
    "Requests that asked for a tier above the highest one of their key, by the tier that they got.",
    ("tier",),
)
CELL_MOVES: Final = Measure(
    "aileron_cell_moves",
    "Tasks that continued in another cell of the fleet, by why they left their cell.",
    ("reason",),
)
STORAGE_AWAY: Final = Measure(
    "aileron_shared_storage_away",
    "Failures of the Redis for rate limits and stored answers; each pauses its use for a while.",
)
REGISTRY_AWAY: Final = Measure(
    "aileron_registry_away", "Times that the fleet's registry in Redis did not answer."
)

TENANT_REQUESTS: Final = Measure(
    "aileron_tenant_requests",
    "Answered requests of tenants on routes that generate text.",
    ("tenant", "tier"),
)
TENANT_PROMPT_TOKENS: Final = Measure(
    "aileron_tenant_prompt_tokens", "Prompt tokens of tenants.", ("tenant", "tier")
)
TENANT_CACHED_TOKENS: Final = Measure(
    "aileron_tenant_cached_tokens",
    "Prompt tokens of tenants that were in the prefix cache.",
    ("tenant", "tier"),
)
TENANT_OUTPUT_TOKENS: Final = Measure(
    "aileron_tenant_output_tokens", "Generated tokens of tenants.", ("tenant", "tier")
)
USAGE: Final = {
    each.name: each
    for each in (
        *(TENANT_REQUESTS, TENANT_PROMPT_TOKENS, TENANT_CACHED_TOKENS, TENANT_OUTPUT_TOKENS),
    )
}
"""Measures of tenants, by name. They are no metrics: clients may choose a tenant's name."""

ANONYMOUS_TENANT: Final = "anonymous"
"""Stands for the tenant of a request without a key and without a fairness id."""
OTHER_TENANTS: Final = "other"
"""Stands for all tenants beyond the limit."""

OWN: Final = {
    each.name: each
    for each in (
        *(TTFT, ITL, TPOT, DURATION, REQUESTS, REJECTIONS, DISCONNECTS, CLIENT_RETRIES),
        *(TOKENS, SLO_TOTAL, SLO_GOOD, TIER_CLAMPED, CELL_MOVES, STORAGE_AWAY, REGISTRY_AWAY),
    )
}
"""The gateways' own measures, by name."""


class Series(msgspec.Struct, frozen=True, array_like=True):
    """One combination of labels: a count, or a histogram's sum and its count per bucket."""

    labels: tuple[str, ...]
    value: float
    counts: tuple[int, ...] = ()
    """Not cumulative; the last one counts values above the highest bound."""


class Family(msgspec.Struct, frozen=True, array_like=True):
    """All series of one name; `bounds` is empty for a counter."""

    name: str
    text: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    series: tuple[Series, ...]


class Measures(msgspec.Struct, frozen=True, tag=True):
    """Totals of a gateway since its first session with this coordinator."""

    families: tuple[Family, ...]


@dataclass(slots=True)
class Growing:
    """A series that still grows."""

    value: float = 0.0
    counts: list[int] = field(default_factory=list)


class Tally:
    """Counters and histograms that grow."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[Measure, dict[tuple[str, ...], Growing]]] = {}

    def begin(self, *measures: Measure) -> None:
        """Create the known series of measures, empty, so that the first increase is visible."""
        for measure in measures:
            for labels in measure.known_series():
                self._growing(measure, labels)

    def count(self, measure: Measure, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        self._growing(measure, labels).value += by

    def observe(self, measure: Measure, value: float, *labels: str) -> None:
        """Add one value to a histogram."""
        growing = self._growing(measure, labels)
        growing.value += value
        growing.counts[bisect_left(measure.bounds, value)] += 1

    def add(
        self, measure: Measure, labels: tuple[str, ...], value: float, counts: Iterable[int]
    ) -> None:
        """Add a count or the buckets of a histogram with the measure's bounds."""
        growing = self._growing(measure, labels)
        growing.value += value
        growing.counts = [a + b for a, b in zip(growing.counts, counts, strict=True)]

    def families(self) -> tuple[Family, ...]:
        """Return all totals."""
        return tuple(
            Family(
                measure.name,
                measure.text,
                measure.labels,
                measure.bounds,
                tuple(
                    Series(labels, growing.value, tuple(growing.counts))
                    for labels, growing in series.items()
                ),
            )
            for measure, series in self._families.values()
        )

    def series_of(self, measure: Measure) -> dict[tuple[str, ...], Growing]:
        """Return the series of a measure by their labels; callers must not change it."""
        return self._families.get(measure.name, (measure, {}))[1]

    def _growing(self, measure: Measure, labels: tuple[str, ...]) -> Growing:
        _, series = self._families.setdefault(measure.name, (measure, {}))
        growing = series.get(labels)
        if growing is None:
            assert len(labels) == len(measure.labels), f"{measure.name} has other labels."
            buckets = len(measure.bounds) + 1 if measure.bounds else 0
            growing = series[labels] = Growing(0.0, [0] * buckets)
        return growing


def quantile(bounds: tuple[float, ...], counts: Iterable[int], share: float) -> float | None:
    """Return the value below which `share` of a histogram lies; None if it is empty.

    Linear within a bucket, as PromQL's `histogram_quantile`; never above the highest bound.
    """
    numbers = list(counts)
    wanted = share * sum(numbers)
    if not wanted:
        return None
    below, lower = 0, 0.0
    for bound, count in zip(bounds, numbers, strict=False):
        if below + count >= wanted:
            return lower + (bound - lower) * (wanted - below) / count
        below, lower = below + count, bound
    return bounds[-1]
