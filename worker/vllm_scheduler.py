"""vLLM adapter: vLLM's scheduler for one mode, over the blocks that are granted to it.

The block pool knows every logical block of the mode, but only granted ones are free to allocate.
Parking withdraws all free blocks and tells which lease indices (pages) running tasks still hold;
those tasks simply stay where they are until their mode is bound again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


@dataclass(slots=True)
class StepPlan:
    """One scheduled step, as sent to followers: logical block ids, tokens that new tasks have."""

    output: SchedulerOutput
    grammar: GrammarOutput | None
    resuming: dict[str, list[int]] = field(default_factory=dict)


class BlockGrants:
    """Which blocks of a vLLM block pool may be allocated; at first none."""

    def __init__(self, pool: BlockPool, slots_per_page: int) -> None:
        self._pool = pool
        self._slots = slots_per_page
        self._granted: set[int] = set()
        self.withdraw()

    @property
    def free(self) -> int:
        """Granted blocks that are free."""
        return int(self._pool.get_num_free_blocks())

    @property
    def total(self) -> int:
        """Granted blocks."""
        return len(self._granted)

    def blocks(self) -> set[int]:
        """The granted blocks, free or in use."""
        return set(self._granted)

    def withdraw(self) -> set[int]:
        """Take back every free block, evicting what is cached in it; the others stay granted.

        Returns the lease indices (pages) that have blocks in use.
        """
        queue = self._pool.free_block_queue
        free = queue.popleft_n(queue.num_free_blocks)
        for block in free:
            self._pool._maybe_evict_cached_block(block)
            self._granted.discard(block.block_id)
        self._count()
        return {block_id // self._slots for block_id in self._granted}

    def grant(self, indices: Iterable[int]) -> None:
        """Make all blocks of these lease indices allocatable that are not in use already."""
        first = self._slots
        ids = [
            block_id
            for index in indices
            for block_id in range(index * first, (index + 1) * first)
            if block_id not in self._granted
        ]
        assert 0 not in ids, "the null page cannot be granted."
        self._pool.free_block_queue.append_n([self._pool.blocks[block_id] for block_id in ids])
        self._granted.update(ids)
        self._count()

    def _count(self) -> None:
        # vLLM computes usage and "is anything in use" from this number; block 0 is its null block.
        self._pool.num_gpu_blocks = len(self._granted) + 1


class ModeScheduler(Scheduler):
    """vLLM's scheduler for the group of one width that this rank leads."""

    def __init__(
        self,
        config: VllmConfig,
        kv_config: KVCacheConfig,
        structured_output: StructuredOutputManager,
        slots_per_page: int,
    ) -> None:
        block_size = kv_config.kv_cache_groups[0].kv_cache_spec.block_size
        super().__init__(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=structured_output,
            block_size=block_size,
            hash_block_size=block_size,
            log_stats=False,
        )
        self.grants = BlockGrants(self.kv_cache_manager.block_pool, slots_per_page)
        self._generated: dict[str, list[int]] = {}
        self._unfed_grammars: set[str] = set()

    def add_task(self, request: Request, generated: list[int]) -> None:
        """Take a task into the waiting queue; `generated` tokens were made by earlier attempts."""
        if generated:
            request.append_output_token_ids(generated)
            request.prefill_stats = None  # Was reported by the first attempt.
            if request.sampling_params is not None:
                request.sampling_params.prompt_logprobs = None  # Likewise.
            self._generated[request.request_id] = generated
            if request.use_structured_output:
                self._unfed_grammars.add(request.request_id)
        self.add_request(request)

    def plan_step(self, settle: Callable[[], None]) -> StepPlan:
        """Schedule one step; `settle` finishes the one under way if a grammar needs it."""
        output = self.schedule()
        if getattr(output, "pending_structured_output_tokens", False):
            settle()
        resuming = {
            r.req_id: self._generated.pop(r.req_id)
            for r in output.scheduled_new_reqs
            if r.req_id in self._generated
        }
        return StepPlan(output, self.get_grammar_bitmask(output), resuming)

    def finish_step(self, plan: StepPlan, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Update all tasks of a step and return what their clients must be told."""
        by_client = self.update_from_output(plan.output, result)
        return [output for outputs in by_client.values() for output in outputs.outputs]

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        ready = super()._handle_blocked_waiting_request(request)
        if ready and request.request_id in self._unfed_grammars:
            self._unfed_grammars.discard(request.request_id)
            accepted = self.structured_output_manager.accept_tokens(
                request, list(request.output_token_ids)
            )
            if not accepted:
                self.grammar_compile_error_reqs.add(request.request_id)
                return False
        return bool(ready)

    @property
    def idle(self) -> bool:
        """Whether no task is left; vLLM may still have finished ids to tell its runner."""
        return not self.requests

    def holding(self) -> list[str]:
        """Tasks that hold KV: these can pause."""
        return [request.request_id for request in self.running]

    def not_holding(self) -> list[str]:
        """Tasks that hold no KV: waiting, or preempted by vLLM."""
        held = set(self.holding())
        return [request_id for request_id in self.requests if request_id not in held]

    def take_back(self, request_ids: Iterable[str]) -> dict[str, list[int]]:
        """Remove tasks, free their blocks and return the tokens each has generated so far."""
        found = {i: self.requests[i] for i in request_ids if i in self.requests}
        generated = {i: list(request.output_token_ids) for i, request in found.items()}
        self.finish_requests(list(found), RequestStatus.FINISHED_ABORTED)
        for request_id in found:
            self._generated.pop(request_id, None)
            self._unfed_grammars.discard(request_id)
        return generated


class AsyncModeScheduler(ModeScheduler, AsyncScheduler):
    """The same over vLLM's asynchronous scheduler: the next step is planned while one runs."""
