"""vLLM adapter: how long steps take in each mode, measured at start-up on the cell that will serve.

The steps are vLLM's own dummy steps, which all modes take alike: they leave out what all do the
same, attention over a context. All ranks of a group must measure together; each uses its own times,
and since a step ends for all of them at its last collective, these are the same but for noise.
"""

import time
from typing import Any

import torch

from comm_pool.layout import StepMode
from worker.step_times import StepCurve, StepTimes, fitted, sizes_to_measure

REPEATS = 3
"""Measurements of each size; the median counts."""

DECODES_AT_ONCE = 4
"""Steps of decodes that are timed together: one alone takes 2 to 4 ms longer than it does when
tasks are served, as the device waits for its launch."""

CPU_TOKENS_MAX = 512
"""Largest step at start-up on CPU, where one of 2,048 tokens takes seconds: beyond it the curves
go straight on."""


def measure_steps(runner: Any, width: int, device: torch.device) -> StepTimes:
    """Time steps in all modes of a runner, its group active and its configuration vLLM's current.

    The runner must be warm: nothing is compiled or captured while a step is timed.
    """
    largest = int(runner.max_num_tokens)
    if device.type == "cpu":
        largest = min(largest, CPU_TOKENS_MAX)
    curves: dict[StepMode, StepCurve] = {}
    for mode in runner.modes:
        sizes = sizes_to_measure(largest, runner.modes)
        samples: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(REPEATS):
            for size in sizes:
                samples[size].append(_timed_step(runner, mode, size, device))
        curves[mode] = fitted(samples)
    runner.use(runner.modes[0])
    return StepTimes(width, curves, runner.graphed_tokens)


def _timed_step(runner: Any, mode: StepMode, tokens: int, device: torch.device) -> float:
    """Seconds of one step: of one token per task as long as there are tasks for it, as decodes.

    Random tokens, because equal ones would all go to the same experts.
    """
    decodes = tokens <= runner.max_num_reqs
    # On CUDA decodes follow one another without a look from the host, and so they are timed.
    steps = DECODES_AT_ONCE if decodes and device.type == "cuda" else 1
    runner.use(mode, reads_prompts=not decodes)
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(steps):
        runner._dummy_run(tokens, uniform_decode=decodes, randomize_inputs=True)
    _synchronize(device)
    return (time.perf_counter() - started) / steps


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
