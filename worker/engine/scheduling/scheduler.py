"""vLLM adapter: vLLM's scheduler for one mode, over the blocks that are granted to it.

The block pool knows every logical block of the mode, but only granted ones can be allocated.
Parking withdraws all free blocks and returns the lease indices (pages) that running tasks still
hold; those tasks stay in place until their mode is bound again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvadaptor.group_directory import GroupDirectory
from kvadaptor.pages import distinct
from worker.engine.counters import EngineCounts
from worker.engine.scheduling.block_entries import BlockEntries
from worker.engine.scheduling.connector import BlockConnector
from worker.engine.scheduling.grants import BlockGrants
from worker.engine.scheduling.handover import (
    FinishedChains,
    cache_chain,
    forget_hashes,
    register_some,
    running_state,
    take_blocks,
)
from worker.engine.scheduling.micro_batches import AHEAD_MAX, is_due, schedule_share
from worker.engine.scheduling.movable import are_cached, can_move, progress_since, written_blocks
from worker.engine.scheduling.new_tasks import Tokens
from worker.engine.scheduling.pace import schedule_paced
from worker.engine.scheduling.preemption import CatchingUp, make_room, protect, put_batch_last
from worker.engine.scheduling.quick_slots import use_quick_slots
from worker.engine.scheduling.step_plan import StepPlan, with_own_mask
from worker.engine.scheduling.token_rows import whole_tokens
from worker.engine.scheduling.void_blocks import forget_void, preempt_readers, with_void_blocks
from worker.engine.scheduling.watched_pool import watch
from worker.rank.task_state import CachedChain, RunningState, StateChange

LOOKAHEAD_FREE = 2
"""Tasks get blocks in advance only if this many times as many are free: none is preempted."""


class ModeScheduler(Scheduler):
    """vLLM's scheduler for the group of one width that this rank leads."""

    ahead_max = 1
    """Steps in flight of a pipeline group that may compute one task."""

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
            log_stats=True,
        )
        use_quick_slots(self.kv_cache_manager)
        # Blocks of a task that ends during its own step are freed only after that step.
        self.defer_block_free = True
        self._lookahead: int = config.num_lookahead_tokens
        """What vLLM itself wants: for speculative tokens, so usually 0."""
        self._counts = EngineCounts()
        self.grants = BlockGrants(self.kv_cache_manager.block_pool, slots_per_page)
        self._generated: dict[str, list[int]] = {}
        self._known: dict[str, Tokens] = {}
        """Tokens of migrated tasks that were not sent to followers yet."""
        self._unfed_grammars: set[str] = set()
        self._finished_chains = FinishedChains(self.block_size)
        self._unregistered: list[Request] = []
        """Migrated tasks whose blocks are not registered for hits yet."""
        self._catching_up = CatchingUp()
        self._gone: set[str] = set()
        """Tasks that migrated away but were not removed from vLLM yet."""
        self.blocks: BlockConnector | None = None
        """What its tasks load and store; None if there is nowhere to load from."""
        self.entries: BlockEntries | None = None
        """Its full blocks in the directory of the group; None if the cell has none."""

    def use_connector(self, connector: BlockConnector) -> None:
        """Load and store blocks by these hooks from now on; call before the first task."""
        self.connector = self.blocks = connector

    def use_directory(self, directory: GroupDirectory) -> None:
        """Enter full blocks into the group's directory from now on."""
        self.entries = watch(self.kv_cache_manager.block_pool, directory)

    def add_task(
        self, request: Request, generated: list[int], *, is_promoted: bool = False
    ) -> None:
        """Add a task to the waiting queue; earlier attempts made its `generated` tokens."""
        if is_promoted:
            protect(request)
        if generated:
            request.append_output_token_ids(generated)
            request.prefill_stats = None  # The first attempt reported it.
            if request.sampling_params is not None:
                request.sampling_params.prompt_logprobs = None  # Likewise.
            self._generated[request.request_id] = generated
            if request.use_structured_output:
                self._unfed_grammars.add(request.request_id)
        self._take_in(request)

    def counted(self) -> EngineCounts:
        """Return what vLLM counted since the rank started."""
        self._counts.drain(self.kv_cache_manager)
        return self._counts

    def make_stats(self, *_: Any, **__: Any) -> None:
        """Skip vLLM's statistics per step: a rank reports totals."""

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self.blocks is not None:
            self.blocks.preempted(request)
        super()._preempt_request(request, *args, **kwargs)
        self._counts.preemptions += 1

    def _take_in(self, request: Request) -> None:
        """Queue a request; a front end that has tokens of it knows its first queueing time."""
        self.add_request(request)
        if request.num_output_tokens:
            request.events.clear()

    def plan_step(
        self, settle: Callable[[], None], pace_tokens: int | None = None, stages: int = 1
    ) -> StepPlan:
        """Schedule one step; calls `settle` to finish the in-flight one if a grammar needs it.

        Where tasks decode, prompts make the step about `pace_tokens` large and leave the rest for
        the decodes after them: each of these steps takes its loans' time, and prompts use it.
        """
        if self.blocks is not None:
            self.blocks.look()
        if self.entries is not None:
            self.entries.is_planning = True
        put_batch_last(self, self._catching_up)
        if stages > 1:
            output = schedule_share(self, stages, self.ahead_max)
        elif pace_tokens is None or self._catching_up.any_of(self.requests):
            output = self.schedule()
        else:
            output = schedule_paced(self, pace_tokens)
        if self.entries is not None:
            self.entries.is_planning = False
            if output.num_scheduled_tokens or output.finished_req_ids or output.preempted_req_ids:
                # A void step of a pipeline group is never finished, so nothing would be entered.
                computes = bool(output.total_num_scheduled_tokens)
                self.entries.step_is_planned(output, computes=computes)
        if not output.total_num_scheduled_tokens:
            if self.blocks is not None:
                self.blocks.idle()
            make_room(self)
        if getattr(output, "pending_structured_output_tokens", False):
            settle()
        new = [each.req_id for each in output.scheduled_new_reqs]
        generated, known = self._generated, self._known
        resuming = {name: generated.pop(name) for name in new if name in generated}
        whole = {n: whole_tokens(self.requests[n], known.pop(n)) for n in new if n in known}
        grammar = self.get_grammar_bitmask(output)
        if stages > 1 and grammar is not None:
            grammar = with_own_mask(grammar)
        return StepPlan(output, grammar, resuming, known=whole)

    @property
    def passes_tokens(self) -> bool:
        """Whether devices pass sampled tokens on: a task may be in two steps in flight."""
        return self.ahead_max > 1

    @property
    def may_be_void(self) -> bool:
        """Whether a step in flight loads what may be void; vLLM forgets none that follows."""
        return self.blocks is not None and self.blocks.may_be_void

    @property
    def has_more(self) -> bool:
        """Whether there is a step to plan while others are in flight."""
        if self.may_be_void:
            return False
        if self.finished_req_ids or self.get_request_counts()[1]:
            return True
        return any(is_due(each, self.ahead_max) for each in self.running)

    def finish_step(self, plan: StepPlan, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Update all tasks of a step and return the outputs for their clients."""
        self._counts.computed_tokens += plan.tokens
        copies, void = plan.output.kv_connector_metadata, set[int]()
        if self.blocks is not None and copies is not None:
            void = self.blocks.step_is_over(copies)
        if void:
            result, void = self._without_void(result, void)
        of_step: AbstractContextManager[None] = nullcontext()
        if self.entries is not None:
            of_step = self.entries.of_finished_step(plan.output, is_void=bool(void))
        with of_step:
            by_client = self.update_from_output(plan.output, result)
        if void:
            self._catching_up.note(forget_void(self, void))
        return [output for outputs in by_client.values() for output in outputs.outputs]

    def _without_void(
        self, result: ModelRunnerOutput, void: set[int]
    ) -> tuple[ModelRunnerOutput, set[int]]:
        """Return a step's result without what has read void blocks, and those that tasks have."""
        return with_void_blocks(result, void), void

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
        """Whether there is no task; vLLM may still have finished ids to pass to its runner."""
        return not self.requests

    @property
    def is_full(self) -> bool:
        """Whether the runner may lack room for one more task; it still holds unreported ends."""
        known = len(self.requests) + len(self.finished_req_ids)
        return bool(known >= self.max_num_running_reqs)

    @property
    def reads_no_prompt(self) -> bool:
        """Whether the next step computes just the last token of each running task."""
        return all(each.num_tokens - each.num_computed_tokens == 1 for each in self.running)

    def holding(self) -> list[str]:
        """Return the tasks that hold KV: these can pause or migrate.

        They run, or came from another group and have not run here yet.
        """
        held = self._manager.req_to_blocks
        return [each for each in self.requests if held.get(each) and each not in self._gone]

    def held_blocks(self) -> list[int]:
        """Return the logical blocks of all tasks that hold KV; shared ones repeatedly.

        Includes blocks of ended tasks that the in-flight step still writes.
        """
        held = self._manager.req_to_blocks
        held_here = [block.block_id for name in self.holding() for block in held[name]]
        return self._still_written() + held_here

    def _still_written(self) -> list[int]:
        return [block.block_id for _, freed in self.deferred_frees for block in freed]

    @property
    def blocks_free(self) -> int:
        """Granted blocks that are free."""
        return self.grants.free

    @property
    def blocks_total(self) -> int:
        """Granted blocks."""
        return self.grants.total

    @property
    def frees_after_step(self) -> bool:
        """Whether the end of the in-flight step frees blocks."""
        return bool(self.deferred_frees)

    @property
    def _loading(self) -> set[int]:
        return self.blocks.loading if self.blocks is not None else set()

    def withdraw(self) -> npt.NDArray[np.int64]:
        """Park; return the lease indices that the remaining tasks still hold."""
        self._finished_chains.clear()
        if self.entries is not None:
            self.entries.withdraw()
        return self.grants.withdraw(self.held_blocks())

    def movable(self, cached_blocks_max: int) -> tuple[list[RunningState], list[CachedChain]]:
        """Return what another group could continue: running tasks, and chains that can be hit."""
        blocks_of, size, loading = self._blocks_of, self.block_size, self._loading
        tasks = self._movable()
        states = [running_state(t, blocks_of(t.request_id), size, loading) for t in tasks]
        pool = self.kv_cache_manager.block_pool
        return states, self._finished_chains.cached(pool, cached_blocks_max)

    def progress_since(
        self, states: Sequence[RunningState], chains: Iterable[CachedChain]
    ) -> list[StateChange | None] | None:
        """See `EngineScheduler`."""
        if self._loading or not are_cached(self.kv_cache_manager.block_pool, chains):
            return None
        return progress_since(states, self._movable(), self._manager.req_to_blocks)

    def _movable(self) -> list[Request]:
        return [each for each in map(self.requests.__getitem__, self.holding()) if can_move(each)]

    def written_blocks(self) -> npt.NDArray[np.int64]:
        """Return the logical blocks that the in-flight step writes, also of ended tasks."""
        tasks, held = map(self.requests.__getitem__, self.holding()), self._manager.req_to_blocks
        blocks = written_blocks(tasks, held, self.block_size)
        return np.array([*self._still_written(), *self._loading, *blocks], dtype=np.int64)

    def tokens_since(self, counts: Mapping[str, int]) -> dict[str, list[int]]:
        """Return the tokens after these counts of each task's; ended tasks are absent."""
        tasks = ((name, self.requests.get(name)) for name in counts)
        return {name: t._output_token_ids[counts[name] :] for name, t in tasks if t is not None}

    def forget_steps(self) -> None:
        """Forget in-flight steps: the last planned one will never be finished."""
        self.processed_step_seq = self.sched_step_seq
        self._drain_deferred_frees()
        if self.blocks is not None:
            self.blocks.forget_steps()
        if self.entries is not None:
            self.entries.forget_steps()

    def adopt(
        self,
        tasks: Iterable[tuple[Request, npt.NDArray[np.int64]]],
        chains: Sequence[CachedChain],
        granted: npt.NDArray[np.int64],
        indices: npt.NDArray[np.int64],
        known: Mapping[str, Tokens] | None = None,
    ) -> None:
        """Continue restored tasks with their (m,) blocks, and let carried chains be hit.

        The blocks belong to the lease indices `granted`, are free and hold the KV. `chains` are
        oldest first; `indices` are those of a wide group that the migration has filled. `known` are
        the tasks' tokens as followers get them, without newer ones.
        """
        self._known |= known or {}
        self._forget_gone()
        self.grants.extend(granted)
        self.grants.bundle(indices)
        pool = self.kv_cache_manager.block_pool
        moved = list(tasks)
        filled = [blocks for _, blocks in moved] + [chain.blocks for chain in chains]
        if filled and self.kv_cache_manager.enable_caching:
            forget_hashes(pool, distinct(np.concatenate(filled), len(pool.blocks)).tolist())
        take_blocks(self.kv_cache_manager, moved)
        for request, _ in moved:
            self._unregistered.append(request)
            generated = request._output_token_ids.copy()
            if generated:
                self._generated[request.request_id] = generated
                if request.use_structured_output:
                    self._unfed_grammars.add(request.request_id)
            self._take_in(request)
        if self.kv_cache_manager.enable_caching:
            for chain in chains:
                cache_chain(pool, chain, self.block_size)
                self._finished_chains.remember(chain.hashes, chain.prefixes)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        # A migrated task is removed after a switch, when there is no time to hash its prompt.
        if request.request_id not in self._gone:
            self._finished_chains.remember_request(request)
        freed: tuple[dict[str, Any] | None, dict[str, Any] | None] = super()._free_request(
            request, delay_free_blocks
        )
        return freed

    @property
    def _manager(self) -> Any:
        (only,) = self.kv_cache_manager.coordinator.single_type_managers
        return only

    def grant(self, indices: npt.NDArray[np.int64]) -> None:
        """Bind: allow allocation from the pages of these lease indices."""
        self._forget_gone()
        self.look_ahead(0)
        if self.blocks is not None:
            # A step that ended after the group was left may have ended tasks.
            self.blocks.forget_ended()
        self.grants.grant(indices)

    def set_aside(self, pages: int) -> npt.NDArray[np.int64]:
        """Keep this many free lease indices from tasks; return all that are set aside."""
        before = self.grants.aside
        found = self.grants.set_aside(pages)
        if self.blocks is not None and found.size > before.size:
            self.blocks.forget_ended(self.grants.blocks_of(np.setdiff1d(found, before)).tolist())
        return found

    def give_back(self) -> None:
        """Let tasks have all that is set aside."""
        self.grants.give_back()

    def look_ahead(self, tokens: int) -> None:
        """Give each task of a step blocks for this many tokens more, if many blocks are free.

        vLLM itself tells its runner of them, as it does where it expects speculative tokens.
        """
        more = len(self.requests) * -(-tokens // self.block_size)
        tokens *= LOOKAHEAD_FREE * more <= self.grants.free
        self.num_lookahead_tokens = self._lookahead + tokens

    def holders_of(self, indices: npt.NDArray[np.int64]) -> list[str]:
        """Return tasks with a block in one of these lease indices; the mode is not bound."""
        slots = self.grants.slots_per_page
        named = np.zeros(self.grants.indices, dtype=np.bool_)
        named[indices] = True
        parked = self.grants.parked_indices
        if parked is not None and not named[parked].any():
            return []
        return [n for n in self.holding() if named[np.array(self._blocks_of(n)) // slots].any()]

    def _blocks_of(self, request_id: str, first: int = 0, last: int | None = None) -> list[int]:
        held = self._manager.req_to_blocks.get(request_id, ())[first:last]
        return [block.block_id for block in held]

    def not_holding(self) -> list[str]:
        """Return tasks that hold no KV: waiting, or preempted by vLLM."""
        held = set(self.holding())
        return [each for each in self.requests if each not in held and each not in self._gone]

    def not_movable(self) -> list[str]:
        """Return tasks whose KV another group could not continue with."""
        return [name for name in self.holding() if not can_move(self.requests[name])]

    def outgrown(self) -> list[str]:
        """Return tasks whose next token needs more blocks than the group has."""
        most, gone = self.grants.reach * self.block_size, self._gone
        return [n for n, each in self.requests.items() if each.num_tokens > most and n not in gone]

    def leave_to_others(self, request_ids: Iterable[str]) -> None:
        """Forget tasks that continue elsewhere: here at once, in vLLM when it is tidied."""
        self._gone.update(each for each in request_ids if each in self.requests)

    def tidy(self, most: int | None = None) -> bool:
        """Free the rest of tasks that have gone, and let blocks of tasks that have come be hit.

        At most `most` of either: about 50 µs each at 1,000 tokens. Returns whether it is done.
        """
        self._forget_gone(most)
        come = self._unregistered if self.grants.parked_indices is None else []
        register_some(self.kv_cache_manager, come, self.requests, most)
        return not (self._gone or come)

    def _forget_gone(self, most: int | None = None) -> None:
        if some := list(islice(self._gone, most)):
            self.take_back(some)
            self._gone.difference_update(some)
            if not self._gone:
                self._finished_chains.clear()
                here = self.requests
                self._unregistered = [r for r in self._unregistered if here.get(r.request_id) is r]

    def take_back(self, request_ids: Iterable[str]) -> dict[str, list[int]]:
        """Remove tasks, free their blocks and return the tokens that each has generated."""
        found = {i: self.requests[i] for i in request_ids if i in self.requests}
        generated = {i: list(request.output_token_ids) for i, request in found.items()}
        self.finish_requests(list(found), RequestStatus.FINISHED_ABORTED)
        for request_id in found:
            self._generated.pop(request_id, None)
            self._known.pop(request_id, None)
            self._unfed_grammars.discard(request_id)
        return generated


class AsyncModeScheduler(ModeScheduler, AsyncScheduler):
    """The same over vLLM's asynchronous scheduler: the next step is planned while one runs."""

    ahead_max = AHEAD_MAX

    def _without_void(
        self, result: ModelRunnerOutput, void: set[int]
    ) -> tuple[ModelRunnerOutput, set[int]]:
        preempt_readers(self, void)
        return result, set()
