"""How long loans may make a step."""

import pytest

from coordinator.protocol.floor import floor_goal_s
from coordinator.protocol.policy_config import SloConfig, SloTarget


def test_the_tightest_goal_that_is_not_of_batches_counts_by_half() -> None:
    assert floor_goal_s(SloConfig()) == pytest.approx(0.015)
    only_batches = SloConfig(
        interactive=SloTarget(), standard=SloTarget(ttft_ms=100), batch=SloTarget(tpot_ms=10)
    )
    assert floor_goal_s(only_batches) is None
    one = SloConfig(interactive=SloTarget(), standard=SloTarget(tpot_ms=80))
    assert floor_goal_s(one) == pytest.approx(0.04)
