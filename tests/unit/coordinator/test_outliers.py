"""Who is left out of layouts because it holds the others up, and for how long."""

from collections.abc import Sequence

import msgspec
import pytest

from comm_pool.layout import Mode, Rank
from coordinator.model.settings import LATE_OUT_MS, OutlierSettings
from coordinator.model.step_line import sums_of
from coordinator.protocol.messages.rank import Report
from coordinator.protocol.messages.steps import ServedSteps, StepSums
from coordinator.protocol.terms import Binding, Carry, Phase, Stage
from coordinator.ranks.outliers import (
    BRIEF_OUT_MS,
    FORGIVEN_AFTER_MS,
    OUT_MS_MAX,
    SLOW_OUT_MS,
    WINDOW_MS,
    WINDOWS,
    OutlierDetector,
    out_ms,
    paces_of,
    slow_ranks,
)
from coordinator.switching.switcher import Switcher
from tests.harness.coordinator.builders import layout, report, target
from tests.harness.coordinator.switchers import Ranks, settings

RANKS = tuple(map(Rank, range(4)))
LIMIT_MS = 10_000


def steps(seconds: float, count: int = 20, tokens: int = 4) -> StepSums:
    return sums_of([(tokens + number % 3, 100 * number, seconds) for number in range(count)])


def told(rank: int, sums: StepSums, mode: Mode = Mode.DP) -> Report:
    served = (ServedSteps(mode, 1, sums),)
    return msgspec.structs.replace(report(rank, Stage(1, Phase.SERVE)), served=served)


def windows(
    health: OutlierDetector, seconds: Sequence[float], count: int = WINDOWS, start_ms: int = 0
) -> list[Rank]:
    """Let each rank take so long for its steps, window after window; returns who is taken out."""
    found = []
    for number in range(1, count + 1):
        for rank, each in enumerate(seconds):
            health.on_report(told(rank, steps(each)), RANKS, 0)
        outcasts = health.slow(RANKS, start_ms + number * WINDOW_MS)
        found += [each.rank for each in outcasts]
    return found


def test_a_rank_that_is_ten_times_slower_for_some_windows_is_taken_out() -> None:
    health = OutlierDetector(OutlierSettings(), 4)
    assert windows(health, (0.01, 0.01, 0.1, 0.012), WINDOWS - 1) == []
    assert windows(health, (0.01, 0.01, 0.1, 0.012), 1, 9_000) == [2]


def test_a_moment_or_what_all_suffer_from_takes_nobody_out() -> None:
    health = OutlierDetector(OutlierSettings(), 4)
    for round_ in range(4):
        start_ms = round_ * 20_000
        assert windows(health, (0.01, 0.01, 0.1, 0.01), WINDOWS - 1, start_ms) == []
        assert windows(health, (0.1, 0.1, 0.1, 0.1), 1, start_ms + 10_000) == []
    assert windows(health, (0.1, 0.15, 0.2, 0.3), 9, 100_000) == []


def test_larger_steps_are_not_slow_ones() -> None:
    even = {
        Rank(rank): sums_of([(tokens, 0, 0.01 + tokens / 1_000) for _ in range(9)])
        for rank, tokens in enumerate((1, 2, 400, 3))
    }
    assert max(paces_of(even).values()) < 1.2
    assert slow_ranks(paces_of(even), 5.0) == []


def test_few_steps_or_few_ranks_judge_nobody() -> None:
    assert paces_of({Rank(0): steps(0.1, count=2)}) == {}
    assert slow_ranks({Rank(0): 1.0, Rank(1): 90.0}, 5.0) == []
    health = OutlierDetector(OutlierSettings(), 4)
    for _ in range(9):
        health.on_report(told(0, steps(9.0), Mode.TP), RANKS, 0)
    assert health.slow(RANKS, WINDOW_MS) == []


def test_at_most_half_of_the_ranks_are_out() -> None:
    assert len(slow_ranks(dict(zip(RANKS, (1.0, 1.0, 90.0, 95.0), strict=True)), 5.0)) <= 2
    health = OutlierDetector(OutlierSettings(), 6)
    for number in range(1, WINDOWS + 1):
        for rank, each in enumerate((0.01, 0.01, 0.1)):
            health.on_report(told(rank, steps(each)), RANKS[:3], 0)
        # Of six ranks three are out already.
        assert health.slow(RANKS[:3], number * WINDOW_MS) == []


def test_a_factor_of_zero_takes_nobody_out() -> None:
    assert (
        windows(OutlierDetector(OutlierSettings(slow_factor=0), 4), (0.01, 0.01, 9.0, 0.01), 9)
        == []
    )


def test_each_further_time_is_longer_and_old_ones_are_forgiven() -> None:
    times = [out_ms(LATE_OUT_MS, count) for count in range(1, 20)]
    assert times[:5] == [5_000, 5_000, 60_000, 120_000, 240_000]
    assert times[-1] == OUT_MS_MAX
    health, waits = OutlierDetector(OutlierSettings(stage_limit_ms=100), 4), {Rank(1): None}

    def late(at_ms: int) -> int:
        assert health.late(at_ms, waits, RANKS, at_ms) == []
        (found,) = health.late(at_ms, waits, RANKS, at_ms + 100)
        return found.out_ms

    assert [late(at) for at in (0, 1_000, 2_000, 3_000)] == times[:4]
    assert late(4_000 + FORGIVEN_AFTER_MS) == times[0]
    health.renewed(Rank(1))
    assert late(5_000 + FORGIVEN_AFTER_MS) == times[0]
    assert SLOW_OUT_MS[0] >= 10 * WINDOW_MS


def short(rank: int, formation: int) -> Report:
    """A report that tells of a step without room in `formation`."""
    return msgspec.structs.replace(report(rank, Stage(1, Phase.SERVE)), oom_formation=formation)


def test_a_rank_whose_step_had_no_room_is_left_out_once_for_each_formation() -> None:
    health = OutlierDetector(OutlierSettings(), 4)
    assert health.on_report(short(1, 0), RANKS, 0) == []
    (out,) = health.on_report(short(1, 3), RANKS, 0)
    assert (out.rank, out.out_ms) == (1, LATE_OUT_MS[0])
    assert health.on_report(short(1, 3), RANKS, 10) == [], "it is told again and again"
    assert health.on_report(short(1, 3), (Rank(0), Rank(2), Rank(3)), 20) == []
    outs = [
        health.on_report(short(1, formation), RANKS, formation)[0].out_ms for formation in (4, 5)
    ]
    assert outs == [*LATE_OUT_MS[1:]], "longer each time"
    health.renewed(Rank(1))
    assert health.on_report(short(1, 2), RANKS, 30)[0].out_ms == LATE_OUT_MS[0]


def test_who_cannot_be_spared_is_left_out_for_a_moment() -> None:
    """Its group waits for another layout, so it is never let off."""
    health = OutlierDetector(OutlierSettings(), 4)
    (out,) = health.on_report(short(1, 3), (Rank(0), Rank(1)), 0)
    assert out.out_ms == BRIEF_OUT_MS
    assert health.on_report(short(2, 3), (Rank(0), Rank(1)), 0) == [], "it is out already"


def test_who_is_late_is_blamed_and_who_waits_with_it_is_not() -> None:
    health = OutlierDetector(OutlierSettings(stage_limit_ms=LIMIT_MS), 4)
    joined: Binding = target("tp2+dp2", 1).bindings[0]
    waits = {Rank(0): joined, Rank(1): joined}
    stage = Stage(3, Phase.PARK)
    assert health.late(stage, waits, RANKS, 0) == []
    assert health.late(stage, waits, RANKS, LIMIT_MS - 1) == []
    assert [each.rank for each in health.late(stage, waits, RANKS, LIMIT_MS)] == [0]
    later = Stage(3, Phase.SWAP)
    assert health.late(later, {Rank(1): joined}, RANKS, LIMIT_MS + 1) == []
    assert [each.rank for each in health.late(later, {Rank(1): joined}, RANKS, 3 * LIMIT_MS)] == [1]
    every = dict.fromkeys(RANKS)
    assert health.late(Stage(4, Phase.MOVE), every, RANKS, 4 * LIMIT_MS) == []
    assert health.late(Stage(4, Phase.MOVE), every, RANKS, 9 * LIMIT_MS) == []


def late_ranks(limit_ms: int = 400) -> Ranks:
    """A switch under way for which rank 3 does nothing but report."""
    ranks = Ranks()
    health = OutlierSettings(stage_limit_ms=limit_ms)
    ranks.switcher = Switcher(settings(health), ranks.roster, 0)
    for rank in RANKS:
        ranks.hear(rank, Stage(0, Phase.PARK))
    ranks.serve()
    wanted = layout("tp4")
    ranks.switcher.retarget(wanted, ranks.switcher.carry, "operator", ranks.now_ms)
    ranks.tick()
    return ranks


def test_a_switch_goes_on_without_a_late_rank_which_comes_back_later() -> None:
    ranks = late_ranks()
    before, served = ranks.switcher.stage, Stage(1, Phase.SERVE)
    lost: tuple[Rank, ...] = ()
    for _ in range(20):
        ranks.acknowledge(0, 1, 2)
        ranks.hear(3, served)
        lost += ranks.tick(50)
        if lost:
            break
    assert lost == (3,)
    assert ranks.switcher.epoch > before.epoch
    assert ranks.switcher.alive == (0, 1, 2)
    for _ in Phase:
        ranks.acknowledge(0, 1, 2)
    assert ranks.switcher.is_serving
    ranks.hear(3, served)
    assert ranks.switcher.alive == (0, 1, 2), "its time is not over"
    for _ in range(LATE_OUT_MS[0] // 500 + 1):
        ranks.acknowledge(0, 1, 2)
        ranks.tick(500)
    ranks.hear(3, served)
    assert ranks.switcher.alive == RANKS


@pytest.mark.parametrize("carry", [Carry.DRAIN, Carry.SPECULATE])
def test_who_waits_for_tasks_to_end_is_not_late(carry: Carry) -> None:
    ranks = Ranks()
    ranks.switcher = Switcher(settings(OutlierSettings(stage_limit_ms=100)), ranks.roster, 0)
    for rank in RANKS:
        ranks.hear(rank, Stage(0, Phase.PARK))
    ranks.serve()
    ranks.switcher.retarget(layout("tp4"), carry, "operator", ranks.now_ms)
    served = Stage(1, Phase.SERVE)
    for _ in range(4):
        ranks.acknowledge(0, 1, 2)
        ranks.hear(3, served)
        assert ranks.tick(100) == ()
