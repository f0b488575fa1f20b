"""vLLM adapter: measures at start-up how long steps take in each mode, on the serving cell.

The steps are vLLM's own dummy steps, which all modes run alike. They omit attention over a context,
which all modes do the same. All ranks of a group must measure together. Each uses its own times;
these agree but for noise, since a step ends for all ranks at its last collective. A pipeline stage
times its own layers alone, and the times of the slowest stage count: as often as it ends a step,
the group does.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import structlog
import torch
import torch.distributed as dist
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator

from comm_pool.layout import Mode, StepMode
from comm_pool.pool import CommunicatorPool, activate
from worker.engine.config import ModeKey
from worker.engine.sequence_parallel.exchange import PARTS_FROM_TOKENS, Exchange
from worker.rank.step_times import (
    StepCurve,
    StepTimes,
    chosen_parts,
    fitted,
    pace_tokens,
    sizes_to_measure,
)

log = structlog.get_logger()

REPEATS = 3
"""Measurements per size; the median counts."""

DECODES_AT_ONCE = 4
"""Decode steps that are timed together, after one that is timed alone and taken off.

That one takes 2 to 4 ms longer than in service, as the device waits for its launch: as long as a
whole step of a small model.
"""

CPU_TOKENS_MAX = 256
"""Largest step measured on CPU; beyond it the curves are extrapolated.

A step of 2,048 tokens takes seconds there.
"""

CPU_REPEATED_TOKENS_MAX = 64
"""Largest step measured more than once on CPU: longer ones differ less from time to time."""


def settle_parts(runner: Any, device: torch.device) -> None:
    """Choose into how many parts large sp steps split their exchange, alike on all ranks.

    Times each size with every configured number of parts; a collective of the runner's group. On
    CPU nothing overlaps with a matrix product, so all steps use the largest configured number: it
    is configured there only to test it.
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
            seconds[row, column] = median(times[1:])  # The first one allocates memory.
    # A step lasts as long as its slowest rank, and all ranks must choose alike.
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=exchange.group.cpu_group)
    exchange.parts_from = chosen_parts(sizes, exchange.parts_tried, seconds.tolist())
    log.info(
        "exchange_parts",
        tried=exchange.parts_tried,
        seconds=dict(zip(sizes, seconds.tolist(), strict=True)),
        chosen=dict(exchange.parts_from),
    )


def measure_steps(
    runner: Any,
    width: int,
    device: torch.device,
    floor_us: Mapping[StepMode, int],
    stages: GroupCoordinator | None = None,
) -> StepTimes:
    """Time steps in all modes of a runner whose group and configuration are active.

    The runner must be warm: nothing may compile or capture during a timed step. `floor_us` are the
    floors of the modes that borrow, `stages` the group of a pipeline stage.
    """
    floors = {mode: us for mode, us in floor_us.items() if mode in runner.modes}
    largest = int(runner.max_num_tokens)
    if device.type == "cpu":
        largest = min(largest, CPU_TOKENS_MAX)
    curves: dict[StepMode, StepCurve] = {}
    for mode in runner.modes:
        # The policy compares all modes. On CPU it does so by few sizes, as steps take long there.
        all_sizes = bool(floors) or device.type == "cuda"
        sizes = sizes_to_measure(largest, runner.modes, all_sizes=all_sizes)
        samples: dict[int, list[float]] = {size: [] for size in sizes}
        for repeat in range(REPEATS):
            for size in sizes:
                if repeat and device.type == "cpu" and size > CPU_REPEATED_TOKENS_MAX:
                    continue
                samples[size].append(_timed_step(runner, mode, size, device))
        medians = {size: median(of_size) for size, of_size in samples.items()}
        curves[mode] = fitted(medians if stages is None else _slowest(medians, stages, device))
    runner.use(runner.modes[0])
    paces = {
        mode: pace_tokens(curves[mode].points, us, runner.prompt_graph_sizes(mode))
        for mode, us in floors.items()
    }
    hiding = {mode: tokens for mode, tokens in paces.items() if tokens is not None}
    return StepTimes(width, curves, runner.graphed_tokens, floors, hiding)


def _slowest(
    seconds: Mapping[int, float], stages: GroupCoordinator, device: torch.device
) -> dict[int, float]:
    """Return the times of the slowest stage, by tokens; a collective of all."""
    own = torch.tensor(list(seconds.values()), device=device)
    of_all = stages.all_gather(own).view(-1, len(seconds))
    return dict(zip(seconds, of_all.max(dim=0).values.tolist(), strict=True))


def _timed_step(runner: Any, mode: StepMode, tokens: int, device: torch.device) -> float:
    """Return the seconds of one step: of decodes while there are enough tasks, else of prompts."""
    decodes = tokens <= runner.max_num_reqs
    runner.use(mode, reads_prompts=not decodes)

    def seconds(steps: int) -> float:
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(steps):
            # Tokens are random, because equal ones would all go to the same experts.
            runner._dummy_run(tokens, uniform_decode=decodes, randomize_inputs=True)
        _synchronize(device)
        return time.perf_counter() - started

    if not decodes or device.type != "cuda":
        return seconds(1)
    one_s = seconds(1)
    return max(seconds(1 + DECODES_AT_ONCE) - one_s, 0.0) / DECODES_AT_ONCE or one_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graph_bytes(
    communicators: CommunicatorPool,
    configs: Mapping[ModeKey, VllmConfig],
    runners: Mapping[ModeKey, Any],
    progress: Callable[[str, int, int], None],
) -> int:
    """Return the device memory that the graphs of all modes take, by trials; a collective."""
    expected: list[tuple[int, int]] = []
    for done, (key, runner) in enumerate(runners.items()):
        progress("graph trial", done, len(runners))
        communicator = communicators.of_width(key.width, key.stages)
        activate(communicator)
        communicator.group.barrier()
        with set_current_vllm_config(configs[key]):
            expected.append(runner.expected_graph_bytes())
    progress("graph trial", len(runners), len(runners))
    return max(working for working, _ in expected) + sum(rest for _, rest in expected)
