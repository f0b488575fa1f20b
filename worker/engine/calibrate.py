"""vLLM adapter: how long steps take in each mode, measured at start-up on the cell that will serve.

The steps are vLLM's own dummy steps, which all modes take alike: they leave out what all do the
same, attention over a context. All ranks of a group must measure together; each uses its own times,
and since a step ends for all of them at its last collective, these are the same but for noise.
"""

import time
from statistics import median
from typing import Any

import structlog
import torch
import torch.distributed as dist

from comm_pool.layout import Mode, StepMode
from worker.engine.sequence_parallel.exchange import PARTS_FROM_TOKENS, Exchange
from worker.engine.step_times import StepCurve, StepTimes, chosen_parts, fitted, sizes_to_measure

log = structlog.get_logger()

REPEATS = 3
"""Measurements of each size; the median counts."""

DECODES_AT_ONCE = 4
"""Steps of decodes that are timed together: one alone takes 2 to 4 ms longer than it does when
tasks are served, as the device waits for its launch."""

CPU_TOKENS_MAX = 512
"""Largest step at start-up on CPU, where one of 2,048 tokens takes seconds: beyond it the curves
go straight on."""


def settle_parts(runner: Any, device: torch.device) -> None:
    """Choose in how many parts large sp steps exchange, alike in all ranks of the runner's group.

    Each size is timed in all ways that the configuration names; a collective of the group. On CPU,
    where nothing runs beside a product, steps of all sizes take the most parts: what is named there
    is named to try them out.
    """
    exchange: Exchange | None = runner.exchange
    if exchange is None or exchange.parts_tried == (1,):
        return
    if device.type == "cpu":
        exchange.parts_from = ((1, max(exchange.parts_tried)),)
        return
    sizes = sizes_to_measure(int(runner.max_num_tokens), runner.modes)
    sizes = tuple(size for size in sizes if size >= PARTS_FROM_TOKENS)
    if not sizes:
        return
    seconds = torch.zeros(len(sizes), len(exchange.parts_tried), dtype=torch.float64)
    for row, size in enumerate(sizes):
        for column, parts in enumerate(exchange.parts_tried):
            exchange.parts_from = ((0, parts),)
            times = [_timed_step(runner, Mode.SP, size, device) for _ in range(1 + REPEATS)]
            seconds[row, column] = median(times[1:])  # The first one takes memory.
    # A step is over for all ranks when it is for the slowest, and all have to choose the same.
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=exchange.group.cpu_group)
    exchange.parts_from = chosen_parts(sizes, exchange.parts_tried, seconds.tolist())
    log.info(
        "exchange_parts",
        tried=exchange.parts_tried,
        seconds=dict(zip(sizes, seconds.tolist(), strict=True)),
        chosen=dict(exchange.parts_from),
    )


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
