"""How long loans may make a step, and how many whole layers that takes."""

import pytest

from coordinator.protocol.floor import fewest_whole_layers, floor_goal_s
from coordinator.protocol.policy_config import SloConfig, SloTarget


def test_the_tightest_goal_that_is_not_of_batches_counts_by_half() -> None:
    assert floor_goal_s(SloConfig()) == pytest.approx(0.025)
    only_batches = SloConfig(
        interactive=SloTarget(), standard=SloTarget(ttft_ms=100), batch=SloTarget(tpot_ms=10)
    )
    assert floor_goal_s(only_batches) is None
    one = SloConfig(interactive=SloTarget(), standard=SloTarget(tpot_ms=80))
    assert floor_goal_s(one) == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("goal_s", "layer_bytes", "whole"),
    [
        (0.025, 393_000_000, 41),  # 9.35 GB of half layers of a 32B model in 25 ms: 23 of 64
        (0.1, 393_000_000, 0),
        (0.001, 393_000_000, 64),
        (None, 393_000_000, 0),
        (0.001, 0, 0),
    ],
)
def test_the_fewest_whole_layers_that_meet_a_goal(
    goal_s: float | None, layer_bytes: int, whole: int
) -> None:
    assert fewest_whole_layers(64, layer_bytes, 374e9, goal_s) == whole
