"""vLLM adapter: what becomes of tasks whose step has read blocks that changed while it loaded them.

vLLM computes such blocks again in the next step, where it plans one step at a time. Its
asynchronous scheduler keeps the place of the token that the step would have given, and would
compute from it. So there the tasks lose their blocks, as if they were preempted, and what the step
gave them is dropped. No step may have been planned after that one.
"""

import time
from dataclasses import replace
from typing import Any, Protocol

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from worker.engine.scheduling.handover import forget_hashes


class VoidReader(Protocol):
    """What is read and called of a scheduler."""

    running: list[Request]
    block_size: int
    kv_cache_manager: KVCacheManager

    @property
    def _manager(self) -> Any: ...

    def _blocks_of(self, request_id: str, first: int = 0, last: int | None = None) -> list[int]: ...

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None: ...


def with_void_blocks(result: ModelRunnerOutput, void: set[int]) -> ModelRunnerOutput:
    """Return a step's result from which vLLM learns that these blocks are void."""
    return replace(result, kv_connector_output=KVConnectorOutput(invalid_block_ids=void))


def forget_void(scheduler: VoidReader, void: set[int]) -> list[Request]:
    """Let nobody hit void blocks, nor what read them; returns the tasks that have some.

    The first task of each enters it again.

    vLLM leaves them in its cache, as the next step computes them: but the task may end first.
    """
    registered, known = scheduler._manager.num_cached_block, set[int]()
    readers = []
    for request in scheduler.running:
        blocks = scheduler._blocks_of(request.request_id)
        first = _first(blocks, void)
        if first is not None:
            forget_hashes(scheduler.kv_cache_manager.block_pool, blocks[first:])
            own = (number for number in range(first, len(blocks)) if blocks[number] not in known)
            name = request.request_id
            registered[name] = min(next(own, len(blocks)), registered.get(name, 0))
            known.update(blocks[first:])
            readers.append(request)
    return readers


def preempt_readers(scheduler: VoidReader, void: set[int]) -> None:
    """Preempt all tasks that have a void block, before the results of the step are taken in."""
    for request in list(scheduler.running):
        blocks = scheduler._blocks_of(request.request_id)
        first = _first(blocks, void)
        if first is None:
            continue
        forget_hashes(scheduler.kv_cache_manager.block_pool, blocks[first:])
        # What is stored of a preempted task ends there.
        request.num_computed_tokens = first * scheduler.block_size
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)


def _first(blocks: list[int], void: set[int]) -> int | None:
    return next((number for number, block in enumerate(blocks) if block in void), None)
