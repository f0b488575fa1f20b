"""Records of what each switch did and how long it took, for operators.

Invariant: one record per epoch, at most one of them unfinished; late measurements of ranks and
gateways are still added. The switcher and the core call this module.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from coordinator.protocol.messages.rank import SwitchTimes
from coordinator.protocol.terms import Carry


class Outcome(StrEnum):
    """How a switch ended."""

    UNDER_WAY = "under way"
    SERVED = "served"
    """Every rank serves its layout."""
    SUPERSEDED = "superseded"
    """A later target replaced it before that."""


def _no_tasks() -> dict[Carry, int]:
    plans = (Carry.RESHARD, Carry.PAUSE, Carry.DRAIN, Carry.RECOMPUTE, Carry.SPECULATE)
    return dict.fromkeys(plans, 0)


@dataclass(frozen=True, slots=True)
class SwitchRecord:
    """One switch; times in milliseconds, each the largest over the ranks."""

    epoch: int
    from_layout: str
    to_layout: str
    cause: str
    carry: Carry
    started_ms: int
    decide_ms: int
    tasks: Mapping[Carry, int] = field(default_factory=_no_tasks)
    """Running tasks by what the switch did to them; `SPECULATE` counts those begun meanwhile."""
    park_ms: float = 0.0
    swap_ms: float = 0.0
    first_step_ms: float = 0.0
    reshard_ms: float = 0.0
    reshard_bytes: int = 0
    precopy_rounds: int = 0
    """Rounds in which ranks copied KV while their groups served."""
    precopy_bytes: int = 0
    """KV bytes that they pulled from other ranks in these."""
    precopy_ms: int = 0
    gap_ms_max: float = 0.0
    old_end_us: int = 0
    """When the last old step of any rank ended, on the host's monotonic clock; 0 is unknown."""
    new_start_us: int = 0
    """When the first new step of the slowest rank started."""
    stall_ms: float | None = None
    """Longest time of any rank between its last old and its first new step; None is unknown."""
    total_ms: int = 0
    outcome: Outcome = Outcome.UNDER_WAY

    @property
    def cut_over_ms(self) -> float | None:
        """From the last old step's end to the slowest rank's first new step; None is unknown.

        0 if the new step was queued on the device when the old one ended.
        """
        known = self.old_end_us and self.new_start_us
        return (self.new_start_us - self.old_end_us) / 1000 if known else None


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a layout was chosen; `candidates` hold each layout's predicted cost."""

    time_ms: int
    choice: str
    carry: Carry
    reason: str
    inputs: Mapping[str, object] = field(default_factory=dict)
    candidates: tuple[Mapping[str, object], ...] = ()
    cause: str = "operator"
    changes: bool = True
    """The decision replaces the layout that was wanted before."""
    since_ms: int | None = None
    """When the first of equal decisions was made; `time_ms` is when the last one was."""


class DecisionLog:
    """The last decisions, newest last; a repeated decision to stay replaces the one before it."""

    __slots__ = ("_decisions",)

    def __init__(self, decisions_max: int) -> None:
        self._decisions: deque[Decision] = deque(maxlen=decisions_max)

    def add(self, decision: Decision) -> None:
        """Remember a decision."""
        since_ms = decision.time_ms
        if self._decisions and not decision.changes:
            last = self._decisions[-1]
            if last.choice == decision.choice and not last.changes:
                since_ms = self._decisions.pop().since_ms or last.time_ms
        self._decisions.append(replace(decision, since_ms=since_ms))

    def last(self, count: int) -> tuple[Decision, ...]:
        """Return the newest `count` decisions, oldest of them first."""
        return tuple(self._decisions)[-count:] if count > 0 else ()


class SwitchLog:
    """The last switches, newest last; at most `records_max` of them."""

    __slots__ = ("_finished", "_records", "_records_max", "_under_way")

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._records: OrderedDict[int, SwitchRecord] = OrderedDict()
        self._under_way: int | None = None
        self._finished: list[SwitchRecord] = []

    def start(self, record: SwitchRecord) -> None:
        """Open a record; it supersedes the one in progress."""
        self._finish(Outcome.SUPERSEDED, record.started_ms)
        self._records[record.epoch] = record
        self._under_way = record.epoch
        while len(self._records) > self._records_max:
            self._records.popitem(last=False)

    def served(self, now_ms: int) -> None:
        """Close the record in progress, if any: its layout serves."""
        self._finish(Outcome.SERVED, now_ms)

    def count(self, carry: Carry, tasks: int = 1) -> None:
        """Add tasks that the switch in progress (or the last one) carried over by this plan."""
        if self._records:
            epoch = next(reversed(self._records))
            record = self._records[epoch]
            counts = {**record.tasks, carry: record.tasks[carry] + tasks}
            self._records[epoch] = replace(record, tasks=counts)

    def on_times(self, times: SwitchTimes) -> None:
        """Add a rank's measurements."""
        record = self._records.get(times.epoch)
        if record is not None:
            self._records[times.epoch] = replace(
                record,
                park_ms=max(record.park_ms, times.park_us / 1000),
                swap_ms=max(record.swap_ms, times.swap_us / 1000),
                first_step_ms=max(record.first_step_ms, times.first_step_us / 1000),
                old_end_us=max(record.old_end_us, times.old_end_us),
                new_start_us=max(record.new_start_us, times.new_start_us),
                stall_ms=_longer(record.stall_ms, times),
                reshard_ms=max(record.reshard_ms, times.reshard_us / 1000),
                reshard_bytes=record.reshard_bytes + times.reshard_bytes,
            )

    def precopied(self, epoch: int, rounds: int, copied_bytes: int, took_ms: int) -> None:
        """Note what ranks have copied for a switch while their groups served."""
        record = self._records.get(epoch)
        if record is not None:
            self._records[epoch] = replace(
                record, precopy_rounds=rounds, precopy_bytes=copied_bytes, precopy_ms=took_ms
            )

    def on_gap(self, epoch: int, gap_ms: float) -> None:
        """Add the longest pause of a gateway's streams."""
        record = self._records.get(epoch)
        if record is not None:
            gap_ms_max = max(record.gap_ms_max, gap_ms)
            self._records[epoch] = replace(record, gap_ms_max=gap_ms_max)

    def last(self, count: int) -> tuple[SwitchRecord, ...]:
        """Return the newest `count` records, oldest of them first."""
        return tuple(self._records.values())[-count:] if count > 0 else ()

    def take_finished(self) -> list[SwitchRecord]:
        """Return the records finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, outcome: Outcome, now_ms: int) -> None:
        if self._under_way is None:
            return
        record = self._records[self._under_way]
        record = replace(record, outcome=outcome, total_ms=now_ms - record.started_ms)
        self._records[self._under_way] = record
        self._under_way = None
        self._finished.append(record)


def _longer(stall_ms: float | None, times: SwitchTimes) -> float | None:
    if not (times.old_end_us and times.new_start_us):
        return stall_ms
    return max(stall_ms or 0.0, (times.new_start_us - times.old_end_us) / 1000)
