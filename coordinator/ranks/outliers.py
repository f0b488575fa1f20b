"""Which living ranks are better left out for a while. Pure.

They are late in a switch, far slower than the rest, or had no room on their device for a step. Such
a rank is left out of the layout for a while, its tasks go on elsewhere, and its process is let
alone: nobody can tell from here whether it is the device, a neighbour or the moment. It comes back
when its time is over, sooner after the first time than after the third. At most half of the ranks
are left out, as most of them cannot be the exception. Source: outlier detection in Envoy. Called by
the switcher.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from comm_pool.layout import Mode, Rank
from coordinator.model.settings import OutlierSettings
from coordinator.model.step_line import StepLine, fit, plus
from coordinator.protocol.messages.rank import Report
from coordinator.protocol.messages.steps import StepSums
from coordinator.protocol.terms import Binding

WINDOW_MS = 1_500
"""Steps are compared over so long a time: those of all ranks meet the same machine."""

WINDOWS = 3
"""A rank must be slow in so many windows, one behind the other."""

STEPS_MIN = 4
"""Steps in a window from which its leader can be judged, or be compared with."""

OTHERS_MIN = 2
"""Ranks that a slow one must be compared with: of two nobody can say which is the slow one."""

SLOW_OUT_MS = (30_000, 60_000)
"""Time out after the first, second ... time; doubled each time behind the last."""

BRIEF_OUT_MS = 1_000
"""Time out of a rank that had no room and cannot be spared: the others hear of it and come out of
the step that it was in."""

OUT_MS_MAX = 960_000
FORGIVEN_AFTER_MS = 1_800_000
"""A rank that was not taken out for so long counts as one that never was."""


@dataclass(frozen=True, slots=True)
class Ejection:
    """A rank to be taken out, for how long, and why."""

    rank: Rank
    out_ms: int
    cause: str


class OutlierDetector:
    """What was seen of the ranks' pace and promptness; times are milliseconds of one clock."""

    __slots__ = (
        "_oom_formation",
        "_outs",
        "_settings",
        "_since_ms",
        "_slow",
        "_stage",
        "_sums",
        "_window_ms",
        "_world",
    )

    def __init__(self, settings: OutlierSettings, world: int) -> None:
        self._settings = settings
        self._world = world
        self._stage: object = None
        self._since_ms = 0
        self._sums: dict[Rank, StepSums] = {}
        self._window_ms = 0
        self._slow: dict[Rank, int] = {}
        """In how many windows in a row each rank was slow."""
        self._outs: dict[Rank, tuple[int, int]] = {}
        """How often each rank was taken out, and when last."""
        self._oom_formation: dict[Rank, int] = {}
        """The formation in which a step of each rank found no room last."""

    def on_report(self, report: Report, serving: Collection[Rank], now_ms: int) -> list[Ejection]:
        """Take the steps that a rank served alone; those of groups say nothing of one rank.

        Return it, for once, if a step of it found no room: all its group came out of that step and
        waits for another layout, so it is always left out.
        """
        for served in report.served:
            if served.mode is Mode.DP:
                before = self._sums.get(report.rank, StepSums())
                self._sums[report.rank] = plus(before, served.sums)
        if report.oom_formation <= self._oom_formation.get(report.rank, 0):
            return []
        self._oom_formation[report.rank] = report.oom_formation
        if report.rank not in serving:
            return []
        out = self._out(report.rank, self._settings.late_out_ms, "had no room for a step", now_ms)
        return [out if self._spared(serving) else replace(out, out_ms=BRIEF_OUT_MS)]

    def slow(self, serving: Collection[Rank], now_ms: int) -> list[Ejection]:
        """Judge a window that is over: `serving` are the ranks that serve now."""
        if now_ms - self._window_ms < WINDOW_MS:
            return []
        self._window_ms = now_ms
        sums, self._sums = self._sums, {}
        if self._settings.slow_factor <= 0:
            return []
        paces = paces_of({rank: sums[rank] for rank in sums if rank in serving})
        outliers = slow_ranks(paces, self._settings.slow_factor)
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in outliers}
        found = [rank for rank, windows in self._slow.items() if windows >= WINDOWS]
        worst = sorted(found, key=paces.__getitem__, reverse=True)[: self._spared(serving)]
        return [self._out(rank, SLOW_OUT_MS, "slow", now_ms) for rank in worst]

    def late(
        self,
        stage: object,
        waited_for: Mapping[Rank, Binding | None],
        alive: Collection[Rank],
        now_ms: int,
    ) -> list[Ejection]:
        """Return who is to be left out of a switch whose `stage` has waited for too long.

        `waited_for` are the ranks that have not acknowledged it, with what they are joined to. A
        follower of one of them waits itself.
        """
        if stage != self._stage:
            self._stage, self._since_ms = stage, now_ms
        limit_ms = self._settings.stage_limit_ms
        if not (limit_ms and waited_for) or now_ms - self._since_ms < limit_ms:
            return []
        blamed = [
            rank
            for rank, joined in waited_for.items()
            if joined is None
            or joined.group.leader == rank
            or joined.group.leader not in waited_for
        ]
        if len(blamed) > len(alive) // 2:
            return []
        return [self._out(rank, self._settings.late_out_ms, "late", now_ms) for rank in blamed]

    def forgive(self, stall_ms: int, now_ms: int) -> None:
        """Let the stage under way have begun later: nobody listened for this long."""
        self._since_ms = min(now_ms, self._since_ms + stall_ms)

    def renewed(self, rank: Rank) -> None:
        """A new process takes the rank's place: what was seen of the old one says nothing of it."""
        self._slow.pop(rank, None)
        self._sums.pop(rank, None)
        self._outs.pop(rank, None)
        self._oom_formation.pop(rank, None)

    def _spared(self, serving: Collection[Rank]) -> int:
        """How many of these may be left out, if no more than half of all are to be out."""
        return max(0, self._world // 2 - (self._world - len(serving)))

    def _out(self, rank: Rank, times_ms: Sequence[int], cause: str, now_ms: int) -> Ejection:
        before, last_ms = self._outs.get(rank, (0, now_ms))
        count = 1 if now_ms - last_ms > FORGIVEN_AFTER_MS else before + 1
        self._outs[rank] = count, now_ms
        self._slow.pop(rank, None)
        return Ejection(rank, out_ms(times_ms, count), cause)


def out_ms(times_ms: Sequence[int], count: int) -> int:
    """Return how long a rank stays out after so many times: as listed, then twice as long each."""
    doubled = max(0, count - len(times_ms))
    return min(OUT_MS_MAX, times_ms[min(count, len(times_ms)) - 1] << min(doubled, 20))


def paces_of(sums: Mapping[Rank, StepSums]) -> dict[Rank, float]:
    """Return how long each rank takes for its steps, as a multiple of what all take on average."""
    judged = {rank: each for rank, each in sums.items() if each.steps >= STEPS_MIN}
    total = StepSums()
    for each in judged.values():
        total = plus(total, each)
    line = fit(total) if judged else None
    if line is None:
        return {}
    return {rank: pace for rank, each in judged.items() if (pace := _pace(each, line)) > 0}


def slow_ranks(paces: Mapping[Rank, float], factor: float) -> list[Rank]:
    """Return the ranks whose pace is `factor` times the median of all others, at most half."""
    if len(paces) <= OTHERS_MIN:
        return []
    found = [
        rank
        for rank, pace in paces.items()
        if pace >= factor * median(paces[each] for each in paces if each != rank)
    ]
    worst = sorted(found, key=paces.__getitem__, reverse=True)
    return worst[: len(paces) // 2]


def _pace(sums: StepSums, line: StepLine) -> float:
    """The factor that fits a rank's own steps best to the line: errors are relative."""
    a, b, c = line.base_s, line.token_s * 1e3, line.context_s * 1e6
    told = a * sums.y + b * sums.ty + c * sums.cy
    squared = a * a * sums.n + b * b * sums.tt + c * c * sums.cc
    squared += 2 * (a * b * sums.t + a * c * sums.c + b * c * sums.tc)
    return told / squared if squared > 0 else 0.0
