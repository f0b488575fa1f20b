"""vLLM adapter: what a scheduler's tasks load instead of computing it, by vLLM's connector hooks.

vLLM asks a connector how much of a waiting request's prefix it can load: of a new request, of one
that was preempted, and of one that another rank has begun. So prefixes that left the device,
preemption, and tasks of a lost rank are all served by one look into the sources of blocks. Loads
and stores travel to the group's members with the step (`BlockCopies`), which copies before and
after it computes.

vLLM's own offloading connectors keep one copy per worker, in the worker's layout, and find it by an
index in the scheduler's process: neither another width nor another process could read it.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from worker.engine.scheduling.ahead_loads import AheadLoads
from worker.engine.scheduling.block_copies import (
    BlockCopies,
    BlockSource,
    BlockStores,
    LedTaskView,
    Taken,
)

OFFER_S = 0.5
"""How long places are kept for a request that finds no free blocks; then it looks again."""


@dataclass(slots=True)
class _Offer:
    """What a waiting request could load, from its block `first` to `last`."""

    first: int
    last: int
    places: Taken
    ends_s: float


class BlockConnector:
    """The connector of one mode's scheduler; has what vLLM's scheduler uses of a connector."""

    supports_divergent_local_hybrid_hits = False
    requires_kv_delivery = False

    def __init__(
        self,
        scheduler: LedTaskView,
        sources: Sequence[BlockSource],
        stores: BlockStores | None = None,
        ahead: AheadLoads | None = None,
    ) -> None:
        """Of several sources that have a block, the first is read.

        With `ahead`, tasks wait for long loads while the others run.
        """
        self._scheduler = scheduler
        self._sources = sources
        self._stores = stores
        self._offers: dict[str, _Offer] = {}
        self._step = BlockCopies()
        self._taken: Taken = []
        """What the step that is planned next loads."""
        self._loading: list[tuple[BlockCopies, Taken, list[int]]] = []
        """What the planned steps load that are not over, and into which blocks."""
        self._ahead = ahead

    # ------------------------------------------------------------------ hooks: loads

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local hit the next step can load.

        None lets the request wait for a load ahead.
        """
        size = self._scheduler.block_size
        ahead, name = self._ahead, request.request_id
        if ahead is not None and ahead.knows(name):
            # Once they are there, vLLM has found these blocks itself.
            return (None if ahead.is_loading(name) else 0), False
        first = num_computed_tokens // size
        # The last token is always computed: its logits give the next one.
        last = (request.num_tokens - 1) // size
        known = self._offers.get(request.request_id)
        if known is not None and (known.first, known.last) == (first, last):
            return len(known.places) * size, False
        self._withdraw(request.request_id)
        if request.skip_reading_prefix_cache:
            return 0, False
        places = self._sooner(self._find(request.block_hashes[first:last]))
        if places and self._begin_ahead(request, first, places):
            return None, False
        if places:
            ends_s = time.monotonic() + OFFER_S
            self._offers[request.request_id] = _Offer(first, last, places, ends_s)
        return len(places) * size, False

    def _begin_ahead(self, request: Request, first: int, places: Taken) -> bool:
        """Begin to load beside steps, if the source does that and blocks are free."""
        source, ahead = places[0][0], self._ahead
        tokens = len(places) * self._scheduler.block_size
        if ahead is None or any(each is not source for each, _ in places):
            return False
        budget = self._scheduler.max_num_scheduled_tokens
        return source.goes_ahead(tokens) and ahead.begin(request, first, places, self._step, budget)

    def _find(self, keys: Sequence[bytes]) -> Taken:
        """Take the places of these blocks, up to the first that no source has."""
        for source in self._sources:
            source.refresh()
        places: Taken = []
        for key in keys:
            for source in self._sources:
                if (place := source.take(key)) is not None:
                    places.append((source, place))
                    break
            else:
                break
        return places

    def _sooner(self, places: Taken) -> Taken:
        """Return what is loaded sooner than computed, and let the rest go."""
        for source in self._sources:
            numbers = [number for number, (each, _) in enumerate(places) if each is source]
            if numbers and not source.is_sooner(len(numbers) * self._scheduler.block_size):
                _let_go(places[numbers[0] :])
                del places[numbers[0] :]
        return places

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Load into the blocks that the request got."""
        if self._ahead is not None:
            self._ahead.release(request.request_id)
        offer = self._offers.pop(request.request_id, None)
        if offer is None:
            return
        count = num_external_tokens // self._scheduler.block_size
        taken = offer.places[:count]
        _let_go(offer.places[count:])
        (numbers,) = blocks.get_block_ids()
        pairs = list(zip(numbers[offer.first : offer.first + count], taken, strict=True))
        for source in self._sources:
            into = [block for block, (each, _) in pairs if each is source]
            places = [place for _, (each, place) in pairs if each is source]
            if into:
                source.load(self._step, request.request_id, into, places)
        self._taken += taken

    # ------------------------------------------------------------------ hooks: steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> BlockCopies | None:
        """Return what the planned step copies; None if nothing."""
        step, self._step = self._step, BlockCopies()
        taken, self._taken = self._taken, []
        now_s = time.monotonic()
        for name in [name for name, offer in self._offers.items() if now_s > offer.ends_s]:
            self._withdraw(name)
        into = [*step.load_blocks, *step.lost_blocks]
        if self._ahead is not None and scheduler_output.total_num_scheduled_tokens:
            # The end of a step that computes nothing does not tell that members have their loads.
            places, blocks = self._ahead.await_arrived(step)
            taken, into = [*taken, *places], [*into, *blocks]
        written = partial(_written, scheduler_output, step)
        if self._stores is not None and step.lost_blocks:
            # What lost groups give counts only after the step; the next one stores it.
            self._stores.skip_step(step, written)
        elif self._stores is not None:
            tokens, begun = scheduler_output.num_scheduled_tokens, _begun(scheduler_output)
            self._stores.plan(step, tokens, begun, now_s, written)
        if step.loads:
            self._loading.append((step, taken, into))
        return None if step.is_empty else step

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a task; what it has stored stays until others need the room."""
        self._withdraw(request.request_id)
        if self._ahead is not None:
            self._ahead.release(request.request_id)
        if self._stores is not None:
            self._stores.ended(request)
        return False, None

    def preempted(self, request: Request) -> None:
        """Store what a task has filled that is about to lose its blocks."""
        if self._stores is not None:
            self._stores.loses_blocks(request)

    def step_is_over(self, step: BlockCopies) -> set[int]:
        """Let go what a finished step has loaded; return the blocks whose content is void."""
        if not step.loads:
            return set()
        for each in [each for each in self._loading if each[0] is step]:
            self._loading.remove(each)
            _let_go(each[1])
        return set().union(*(source.gone(step) for source in self._sources))

    @property
    def loading(self) -> set[int]:
        """The blocks that planned steps load which are not over."""
        return {block for _, _, blocks in self._loading for block in blocks}

    @property
    def may_be_void(self) -> bool:
        """Whether a planned step loads what its source may turn out to have lost meanwhile."""
        return any(step.lost_blocks for step, _, _ in self._loading)

    def look(self) -> None:
        """Let vLLM find what has been loaded ahead; call it before a step is planned."""
        ahead = self._ahead
        if ahead is not None:
            # Most steps have no load under way, and many tasks.
            running = self._scheduler.running
            is_busy = bool(ahead.under_way) and any(
                each.num_output_placeholders for each in running
            )
            ahead.look(time.monotonic(), is_busy=is_busy)

    def idle(self) -> None:
        """Wait a moment if nothing runs beside loads ahead: the step that was planned is empty."""
        if self._ahead is not None:
            self._ahead.idle()

    def forget_steps(self) -> None:
        """Let go what all planned steps load: none will be finished."""
        for _, taken, _ in self._loading:
            _let_go(taken)
        self._loading.clear()

    def forget_ended(self, blocks: Collection[int] | None = None) -> None:
        """Store nothing more of ended tasks, or not these blocks: others than this one get them."""
        if self._stores is not None:
            self._stores.forget_ended(blocks)

    def stop(self) -> None:
        """Give up loads ahead and stores to come: the group is left, its copies were stopped."""
        if self._ahead is not None:
            for places in self._ahead.end():
                _let_go(places)
        self._step = BlockCopies()
        if self._stores is not None:
            self._stores.forget_steps()

    def _withdraw(self, name: str) -> None:
        offer = self._offers.pop(name, None)
        if offer is not None:
            _let_go(offer.places)

    # ------------------------------------------------------------------ hooks: nothing to do

    def on_new_request(self, request: Request) -> None:
        """Pass over a new request: vLLM asks again when it can be scheduled."""

    def has_pending_block_frees(self) -> bool:
        """Return False: blocks are free as soon as vLLM says so."""
        return False

    def has_pending_push_work(self) -> bool:
        """Return False: copies are part of steps."""
        return False

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return none: no load outlasts its step."""
        return ()

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> Any:
        """Return no sources: the rank counts hits itself."""
        return None

    def register_finished_partial_tail(self, *_: Any) -> bool:
        """Return False: only full blocks are stored."""
        return False

    def get_kv_connector_stats(self) -> None:
        """Return none: the rank reports totals."""

    def take_events(self) -> Iterable[Any]:
        """Return no events."""
        return ()

    def update_connector_output(self, connector_output: Any) -> None:
        """Pass over what runners say: copies are over with their step."""

    def reset_cache(self) -> bool:
        """Return True, as blocks are found by what they hold."""
        return True

    def shutdown(self) -> None:
        """End with the rank."""


def _let_go(places: Taken) -> None:
    for source, place in places:
        source.let_go((place,))


def _begun(output: SchedulerOutput) -> set[str]:
    """Return the tasks that begin with a step, or go on with it after they were preempted."""
    new = {each.req_id for each in output.scheduled_new_reqs}
    return new | output.scheduled_cached_reqs.resumed_req_ids


def _written(output: SchedulerOutput, step: BlockCopies) -> set[int]:
    """Return the blocks that a step gives to tasks, and those that it loads."""
    given = [each.block_ids for each in output.scheduled_new_reqs]
    given += filter(None, output.scheduled_cached_reqs.new_block_ids)
    loaded = *step.load_blocks, *step.lost_blocks, *step.ahead_blocks
    return set(loaded).union(*chain.from_iterable(given))
