"""Outlier detection: which living ranks to eject from the layout for a while. Pure.

A rank is ejected if it is late in a switch, far slower than the rest, or out of device memory in a
step. Its tasks go on elsewhere and its process is left alone: the cause may be the device, a
neighbour or the moment. A slow link of a lender shows in its borrowers, so they are ejected: an
ejected lender would still lend. A rank comes back when its time is over; repeated ejections last
longer. At most half of the ranks are out at a time, as most cannot be outliers; beyond that, a rank
out of memory is still ejected, but only briefly. Source: outlier detection in Envoy. The switcher
calls this module.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from comm_pool.layout import Mode, Rank
from coordinator.model.settings import OutlierSettings
from coordinator.model.step_line import StepLine, fit, plus
from coordinator.protocol.messages.rank import RankHello, Report
from coordinator.protocol.messages.steps import StepSums
from coordinator.protocol.terms import Binding

WINDOW_MS = 1_500
"""Length of a window in which steps are compared: all ranks then see the same machine."""

WINDOWS = 3
"""A rank must be slow in this many consecutive windows."""

STEPS_MIN = 4
"""Least steps in a window for judging a leader, or for comparing others with it."""

OTHERS_MIN = 2
"""Least ranks to compare a slow one with: of two, neither can be called the slow one."""

SLOW_OUT_MS = (30_000, 60_000)
"""Ejection time after the first, second … time; doubled each time after the last."""

BRIEF_OUT_MS = 1_000
"""Ejection time of a rank that ran out of memory and cannot be spared: long enough for the others
to hear of it and leave the step."""

OUT_MS_MAX = 960_000
FORGIVEN_AFTER_MS = 1_800_000
"""After this long without an ejection, a rank's history is cleared."""


@dataclass(frozen=True, slots=True)
class Ejection:
    """A rank to eject, for how long, and why."""

    rank: Rank
    out_ms: int
    cause: str


class OutlierDetector:
    """The pace and promptness of ranks; times are milliseconds of one clock."""

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
        """In how many consecutive windows each rank was slow."""
        self._outs: dict[Rank, tuple[int, int]] = {}
        """How often each rank was ejected, and when last."""
        self._oom_formation: dict[Rank, int] = {}
        """The last formation in which a step of each rank ran out of device memory."""

    def on_report(self, report: Report, serving: Collection[Rank], now_ms: int) -> list[Ejection]:
        """Add the steps that a rank served alone; steps of groups say nothing about one rank.

        Eject the rank, once per formation, if a step of it ran out of device memory: its whole
        group left that step and waits for another layout.
        """
        for served in report.served:
            if served.mode is Mode.DP:
                before = self._sums.get(report.rank, StepSums())
                self._sums[report.rank] = plus(plus(before, served.sums), served.at_floor)
        if report.oom_formation <= self._oom_formation.get(report.rank, 0):
            return []
        self._oom_formation[report.rank] = report.oom_formation
        if report.rank not in serving:
            return []
        out = self._out(report.rank, self._settings.late_out_ms, "ran out of memory", now_ms)
        return [out if self._spared(serving) else replace(out, out_ms=BRIEF_OUT_MS)]

    def slow(
        self, serving: Collection[Rank], now_ms: int, hellos: Iterable[RankHello] = ()
    ) -> list[Ejection]:
        """Judge the window if it is over; `serving` are the ranks that serve now.

        `hellos` say how long the loans of ranks take that borrow.
        """
        if now_ms - self._window_ms < WINDOW_MS:
            return []
        self._window_ms = now_ms
        sums, self._sums = self._sums, {}
        if self._settings.slow_factor <= 0:
            return []
        served = {rank: sums[rank] for rank in sums if rank in serving}
        paces = paces_of(served, usual_floors(each for each in hellos if each.rank in serving))
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
        """Return the ranks to eject from a switch whose `stage` has exceeded its limit.

        `waited_for` are the ranks that have not acknowledged it, with the group each is joined to.
        A follower is not blamed while its leader is waited for.
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
        """Move the stage's start later: the coordinator did not listen for this long."""
        self._since_ms = min(now_ms, self._since_ms + stall_ms)

    def renewed(self, rank: Rank) -> None:
        """A new process takes the rank's place: drop the old one's history."""
        self._slow.pop(rank, None)
        self._sums.pop(rank, None)
        self._outs.pop(rank, None)
        self._oom_formation.pop(rank, None)

    def _spared(self, serving: Collection[Rank]) -> int:
        """How many of these may be ejected while at most half of all ranks are out."""
        return max(0, self._world // 2 - (self._world - len(serving)))

    def _out(self, rank: Rank, times_ms: Sequence[int], cause: str, now_ms: int) -> Ejection:
        before, last_ms = self._outs.get(rank, (0, now_ms))
        count = 1 if now_ms - last_ms > FORGIVEN_AFTER_MS else before + 1
        self._outs[rank] = count, now_ms
        self._slow.pop(rank, None)
        return Ejection(rank, out_ms(times_ms, count), cause)


def out_ms(times_ms: Sequence[int], count: int) -> int:
    """Return how long the `count`-th ejection lasts: as listed, then twice as long each time."""
    doubled = max(0, count - len(times_ms))
    return min(OUT_MS_MAX, times_ms[min(count, len(times_ms)) - 1] << min(doubled, 20))


def usual_floors(hellos: Iterable[RankHello]) -> dict[Rank, float]:
    """Return how long the loans of a step should take, in seconds, for each rank that borrows.

    Ranks with as many whole layers borrow as much. Their median counts, because the floor that a
    rank measured over a slow link hides the link. Without enough such ranks its own floor counts.
    """
    own: dict[Rank, tuple[int, float]] = {}
    for hello in hellos:
        for times in hello.step_times:
            if floor_us := dict(times.floor_us).get(Mode.DP, 0):
                own[hello.rank] = hello.whole_layers, floor_us * 1e-6
    usual = {}
    for rank, (whole, floor_s) in own.items():
        alike = [each for layers, each in own.values() if layers == whole]
        usual[rank] = median(alike) if len(alike) > OTHERS_MIN else floor_s
    return usual


def paces_of(
    sums: Mapping[Rank, StepSums], floors_s: Mapping[Rank, float] | None = None
) -> dict[Rank, float]:
    """Return each rank's step time as a multiple of what such steps should take.

    That is the average over all ranks, or its loans (`floors_s`) where these take longer: ranks
    need not borrow equally much.
    """
    eligible = {rank: each for rank, each in sums.items() if each.steps >= STEPS_MIN}
    total = StepSums()
    for each in eligible.values():
        total = plus(total, each)
    line = fit(total) if eligible else None
    if line is None:
        return {}
    paces = {rank: _pace(each, line) for rank, each in eligible.items()}
    for rank, floor_s in (floors_s or {}).items():
        if rank in paces:
            paces[rank] = min(paces[rank], _pace(eligible[rank], StepLine(floor_s, 0.0, 0.0)))
    return {rank: pace for rank, pace in paces.items() if pace > 0}


def slow_ranks(paces: Mapping[Rank, float], factor: float) -> list[Rank]:
    """Return ranks whose pace is `factor` times the median of the others, at most half of all."""
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
    """The factor that scales the line to a rank's own steps with the least relative error."""
    a, b, c = line.base_s, line.token_s * 1e3, line.context_s * 1e6
    product = a * sums.y + b * sums.ty + c * sums.cy
    squared = a * a * sums.n + b * b * sums.tt + c * c * sums.cc
    squared += 2 * (a * b * sums.t + a * c * sums.c + b * c * sums.tc)
    return product / squared if squared > 0 else 0.0
