"""How long loans may make a step."""

import pytest

from coordinator.protocol.floor import floor_goal_s, pace_tokens
from coordinator.protocol.policy_config import SloConfig, SloTarget


def test_the_tightest_goal_that_is_not_of_batches_counts_by_half() -> None:
    assert floor_goal_s(SloConfig()) == pytest.approx(0.025)
    only_batches = SloConfig(
        interactive=SloTarget(), standard=SloTarget(ttft_ms=100), batch=SloTarget(tpot_ms=10)
    )
    assert floor_goal_s(only_batches) is None
    one = SloConfig(interactive=SloTarget(), standard=SloTarget(tpot_ms=80))
    assert floor_goal_s(one) == pytest.approx(0.04)


def line(floor_us: int, us_per_token: float, *sizes: int) -> list[tuple[int, int]]:
    """Steps that hide their loans as soon as they compute for longer."""
    return [(each, max(floor_us, round(us_per_token * each))) for each in sizes]


@pytest.mark.parametrize("floor_us", [15_000, 69_000, 132_000])
@pytest.mark.parametrize("us_per_token", [20.0, 90.5, 180.0])
def test_the_pace_is_where_the_computation_takes_as_long_as_the_loans(
    floor_us: int, us_per_token: float
) -> None:
    points = line(floor_us, us_per_token, 1, 4, 16, 64, 256, 1024, 2048, 4096, 8192)
    pace = pace_tokens(points, floor_us)
    assert pace == pytest.approx(floor_us / us_per_token, rel=0.01)


def test_noise_at_the_floor_does_not_count() -> None:
    points = [(1, 68_900), (16, 74_000), (64, 74_000), (256, 74_100), (1024, 93_400)]
    more = [(2048, 183_000), (8192, 716_000)]
    assert pace_tokens([*points, *more], 68_700) == pytest.approx(742, abs=2)
    # A line through the origin, where only one step is above the floor.
    assert pace_tokens(points, 68_700) == pytest.approx(753, abs=2)


def test_nothing_is_paced_where_loans_do_not_hide() -> None:
    assert pace_tokens(line(0, 90.0, 1, 1024), 0) is None
    # Even a step of one token computes for longer than its loans take.
    assert pace_tokens([(1, 90), (64, 100), (512, 900)], 50) is None
    # Loans and computation take turns.
    assert pace_tokens([(n, 10_000 + 90 * n) for n in (1, 4, 16, 64, 256, 512)], 10_000) is None
    # All steps end with their loans.
    assert pace_tokens(line(69_000, 1.0, 1, 64, 512), 69_000) is None
    # The clock went wild.
    assert pace_tokens([(1, 50), (2, 100), (4, 100)], 50) is None
