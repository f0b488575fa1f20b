"""vLLM adapter: gauges of a rank's process, and what the schedulers of its modes counted.

vLLM's scheduler hands out its statistics with every step. A rank keeps totals and reports those, so
that they survive a switch from one mode to the next.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import psutil
from vllm.v1.core.kv_cache_manager import KVCacheManager

from comm_pool.layout import StepMode
from worker.engine.weights.lenders import check_lenders
from worker.engine.weights.ring import LoanRing


@dataclass(slots=True)
class EngineCounts:
    """Totals of one scheduler since the rank started."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    """Tokens of finished steps, those that were computed before included."""

    def drain(self, kv_cache: KVCacheManager) -> None:
        """Add the prefix cache's queries and hits since the last call."""
        stats = kv_cache.make_prefix_cache_stats()
        if stats is not None:
            self.prefix_queries += stats.queries
            self.prefix_hits += stats.hits


class Borrowing(Protocol):
    """What an engine that borrows tells of its loans, in totals since the rank started."""

    @property
    def bytes_borrowed(self) -> int:
        """Bytes of all loans."""

    @property
    def wait_s(self) -> float:
        """How long computation waited for loans."""

    @property
    def whole_layers(self) -> int:
        """The number of layers whose feed-forward part the rank holds whole."""


@dataclass(slots=True)
class LoanCounts:
    """What a rank has borrowed since it started."""

    rings: Mapping[StepMode, tuple[LoanRing, ...]]
    """The rings of the modes whose steps borrow."""
    whole_layers: int = 0
    lenders: tuple[int, ...] = ()
    """The processes whose memory ends with them; none on CPU."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the rank keeps in order to borrow: its ring, and other parts of whole layers."""
    bytes_borrowed: int = 0

    @property
    def modes(self) -> frozenset[StepMode]:
        """The modes whose steps borrow."""
        return frozenset(self.rings)

    def count(self, mode: StepMode) -> None:
        """Count a step in a mode."""
        self.bytes_borrowed += sum(ring.step_bytes for ring in self.rings.get(mode, ()))

    def abort_step(self) -> None:
        """Let later work wait for the copies of a step that has ended before their uses."""
        for ring in self._distinct():
            ring.abort_step()

    def floors_s(self, meet: Callable[[], object]) -> dict[StepMode, float]:
        """Return the seconds of a step's loans alone, by mode; all ranks must measure at once.

        `meet` returns when all ranks have called it.
        """
        found: dict[LoanRing, float] = {}
        for ring in self._distinct():
            meet()
            found[ring] = ring.floor_s()
        return {mode: sum(found[ring] for ring in rings) for mode, rings in self.rings.items()}

    def _distinct(self) -> tuple[LoanRing, ...]:
        return tuple(dict.fromkeys(ring for rings in self.rings.values() for ring in rings))

    def check(self, mode: StepMode) -> None:
        """Raise `LenderLostError` if a finished step in a mode may have read lost memory."""
        if mode in self.rings:
            check_lenders(self.lenders)

    @property
    def wait_s(self) -> float:
        """How long computation waited for loans."""
        return sum(ring.wait_s for ring in self._distinct())


class Counting(Protocol):
    """A scheduler that keeps totals."""

    def counted(self) -> EngineCounts:
        """Return its totals."""


def engine_totals(
    schedulers: Iterable[Counting | None], borrowing: Borrowing | None = None
) -> tuple[tuple[str, int], ...]:
    """Return the sums over the schedulers of the modes that this rank leads, and its loans."""
    each = tuple(scheduler.counted() for scheduler in schedulers if scheduler is not None)
    return (
        ("prefix_queries", sum(one.prefix_queries for one in each)),
        ("prefix_hits", sum(one.prefix_hits for one in each)),
        ("preemptions", sum(one.preemptions for one in each)),
        ("computed_tokens", sum(one.computed_tokens for one in each)),
        ("borrowed_bytes", borrowing.bytes_borrowed if borrowing is not None else 0),
        ("loan_wait_us", round(borrowing.wait_s * 1e6) if borrowing is not None else 0),
    )


def process_gauges() -> tuple[tuple[str, int], ...]:
    """Return the gauges in which a leak would show."""
    process = psutil.Process()
    return (
        ("rss_bytes", process.memory_info().rss),
        ("open_files", process.num_fds()),
        ("threads", process.num_threads()),
    )
