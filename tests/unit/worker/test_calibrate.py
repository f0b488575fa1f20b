"""Start-up measurements of steps on a played device, which waits for the first launch."""

import time
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from comm_pool.layout import Mode, StepMode
from worker.engine import calibrate

LAUNCH_S = 0.003
"""How long the device waits for the first of some steps."""


class Device:
    """A runner whose steps take a base and a time per token."""

    max_num_tokens = 2_048
    max_num_reqs = 256
    graphed_tokens = 0
    modes = (Mode.DP,)
    base_s = 0.0034
    token_s = 1e-5

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sizes = Counter[int]()
        self._is_idle = True

    def use(self, mode: StepMode, *, reads_prompts: bool = False) -> None:
        """Nothing depends on it here."""

    def prompt_graph_sizes(self, mode: StepMode) -> tuple[int, ...]:
        """No graphs."""
        return ()

    def _dummy_run(self, tokens: int, **_: Any) -> None:
        self.sizes[tokens] += 1
        self.now_s += LAUNCH_S * self._is_idle + self.base_s + self.token_s * tokens
        self._is_idle = False

    def synchronize(self, _device: object) -> None:
        """The device has nothing left to do."""
        self._is_idle = True


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(time, "perf_counter", lambda: device.now_s)
    monkeypatch.setattr(calibrate, "_synchronize", device.synchronize)
    return device


def test_a_decode_on_a_device_is_timed_without_the_wait_for_its_launch(runner: Device) -> None:
    found = calibrate.measure_steps(runner, 1, torch.device("cuda"), {})
    times = dict(found.curves[Mode.DP].points)
    for tokens in (1, 64, 256):
        assert times[tokens] == pytest.approx(
            1e6 * (runner.base_s + runner.token_s * tokens), abs=1
        )


def test_dp_is_measured_at_the_sizes_of_the_modes_that_it_is_compared_with(runner: Device) -> None:
    calibrate.measure_steps(runner, 1, torch.device("cuda"), {})
    assert set(runner.sizes) == {1, 4, 16, 64, 256, 1_024, 2_048}
    runner.sizes.clear()
    calibrate.measure_steps(runner, 1, torch.device("cpu"), {})
    assert runner.sizes == {1: calibrate.REPEATS, 256: 1}, "steps of 2,048 tokens take seconds"


class Stages:
    """The group of two stages, of which the other takes this many seconds more."""

    def __init__(self, more_s: float) -> None:
        self.more_s = more_s

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the times of both."""
        return torch.cat([own, own + self.more_s])


@pytest.mark.parametrize("more_s", [0.002, -0.002])
def test_the_slowest_stage_says_how_long_a_pipelined_step_takes(
    runner: Device, more_s: float
) -> None:
    stages: Any = Stages(more_s)
    found = calibrate.measure_steps(runner, 2, torch.device("cpu"), {}, stages)
    ((tokens, us), *_) = found.curves[Mode.DP].points
    own_s = LAUNCH_S + runner.base_s + runner.token_s * tokens
    assert us == pytest.approx(1e6 * (own_s + max(0.0, more_s)), abs=2)
