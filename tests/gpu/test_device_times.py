"""The device's own times of steps.

Needs one NVIDIA GPU and vLLM's CUDA build: `pytest -m gpu tests/gpu/test_device_times.py`.
"""

import time

import pytest

pytest.importorskip("vllm")

import torch

from worker.engine.runners.gpu import DeviceTimes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CYCLES = 40_000_000
"""About 20 ms of a GPU's clock."""


def step() -> tuple[DeviceTimes, float]:
    """A step on an idle device: its times, and its seconds by the host."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    times = DeviceTimes()
    torch.cuda._sleep(CYCLES)
    times.end()
    torch.cuda.synchronize()
    return times, time.perf_counter() - started


def test_a_step_lasts_until_the_device_is_done_not_until_the_host_looks() -> None:
    step()
    first, took_s = step()
    time.sleep(0.1)
    assert first.seconds(None) == pytest.approx(took_s, rel=0.1)


def test_what_the_device_waits_between_two_steps_counts_for_the_second() -> None:
    first, _ = step()
    time.sleep(0.05)
    second, took_s = step()
    assert second.seconds(None) == pytest.approx(took_s, rel=0.1)
    waited_s = second.seconds(first) - second.seconds(None)
    assert waited_s == pytest.approx(0.05, rel=0.1)
