"""vLLM adapter: a scheduler's blocks in host pages, through the hooks of vLLM's KV connectors.

vLLM asks a connector how much of a waiting request's prefix it can load: of a new request, of one
that was preempted, and of one that another rank has begun. So prefixes that left the device,
preemption, and tasks of a lost rank are all served by one look into the directory. Loads and stores
travel to the group's members with the step (`HostStep`), which copies before and after it computes.

vLLM's own offloading connectors keep one copy per worker, in the worker's layout, and find it by an
index in the scheduler's process: neither another width nor another process could read it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvadaptor.host.directory import HostDirectory

OFFER_S = 0.5
"""How long pages stay pinned for a request that finds no free blocks; then it looks again."""


@dataclass(slots=True)
class HostStep(KVConnectorMetadata):
    """What a step copies: loads before it computes, stores afterwards. Blocks are logical."""

    load_blocks: list[int] = field(default_factory=list)
    load_pages: list[int] = field(default_factory=list)
    store_blocks: list[int] = field(default_factory=list)
    store_pages: list[int] = field(default_factory=list)
    store_tags: list[int] = field(default_factory=list)


class HostCounts(Protocol):
    """What a rank counts of its host pages, in totals since it started."""

    hit_tokens: int
    """Tokens that tasks took from host pages instead of computing them."""
    full: int
    """Blocks that found no page, as all were in use."""


class LedTaskView(Protocol):
    """The scheduler's side that the connector reads."""

    requests: dict[str, Request]
    block_size: int

    def _blocks_of(self, request_id: str) -> list[int]: ...


@dataclass(slots=True)
class _Offer:
    """Pages that a waiting request could load, from its block `first` to `last`; all are pinned."""

    first: int
    last: int
    pages: list[int]
    ends_s: float


class HostBlocks:
    """The connector of one mode's scheduler; has what vLLM's scheduler uses of a connector."""

    supports_divergent_local_hybrid_hits = False
    requires_kv_delivery = False

    def __init__(
        self,
        scheduler: LedTaskView,
        directory: HostDirectory,
        shares: int,
        counts: HostCounts,
        is_sooner: Callable[[int], bool],
    ) -> None:
        """`shares` members write a page; `is_sooner` tells if loading beats computing.

        It is asked with a number of tokens.
        """
        self._scheduler = scheduler
        self._directory = directory
        self._shares = shares
        self._counts = counts
        self._is_sooner = is_sooner
        self._offers: dict[str, _Offer] = {}
        self._step = HostStep()
        self._stored: dict[str, int] = {}
        """How many blocks of each task were looked at for storing."""
        self._used: dict[str, list[int]] = {}
        """The pages that each task has filled or loaded."""
        self._loading: list[list[int]] = []
        """The pinned pages of the planned steps that are not over."""

    # ------------------------------------------------------------------ hooks: loads

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens beyond the local hit can be loaded, before the next step."""
        directory, size = self._directory, self._scheduler.block_size
        first = num_computed_tokens // size
        # The last token is always computed: its logits give the next one.
        last = (request.num_tokens - 1) // size
        known = self._offers.get(request.request_id)
        if known is not None and (known.first, known.last) == (first, last):
            return len(known.pages) * size, False
        self._withdraw(request.request_id)
        directory.refresh()
        pages: list[int] = []
        for key in request.block_hashes[first:last]:
            page = directory.find(key)
            if page is None or not directory.pin(page, key):
                break
            pages.append(page)
        if not pages:
            return 0, False
        if request.skip_reading_prefix_cache or not self._is_sooner(len(pages) * size):
            directory.unpin(pages)
            return 0, False
        ends_s = time.monotonic() + OFFER_S
        self._offers[request.request_id] = _Offer(first, last, pages, ends_s)
        return len(pages) * size, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Load into the blocks that the request got."""
        offer = self._offers.pop(request.request_id, None)
        if offer is None:
            return
        count = num_external_tokens // self._scheduler.block_size
        taken, rest = offer.pages[:count], offer.pages[count:]
        self._directory.unpin(rest)
        (numbers,) = blocks.get_block_ids()
        self._step.load_blocks += numbers[offer.first : offer.first + count]
        self._step.load_pages += taken
        self._counts.hit_tokens += num_external_tokens
        self._use(request.request_id, taken)

    # ------------------------------------------------------------------ hooks: stores

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> HostStep | None:
        """Return what the planned step copies; None if nothing."""
        step, self._step = self._step, HostStep()
        now_s = time.monotonic()
        for name in [name for name, offer in self._offers.items() if now_s > offer.ends_s]:
            self._withdraw(name)
        self._directory.settle()
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            self._plan_stores(step, self._scheduler.requests[name], tokens, now_s)
        if not (step.load_pages or step.store_pages):
            return None
        if step.load_pages:
            self._loading.append(step.load_pages)
        return step

    def _plan_stores(self, step: HostStep, request: Request, tokens: int, now_s: float) -> None:
        """Add the blocks that are full after the step and in no host page yet."""
        name, size = request.request_id, self._scheduler.block_size
        first = self._stored.get(name, 0)
        full = min((request.num_computed_tokens + tokens) // size, len(request.block_hashes))
        if full <= first:
            return
        self._stored[name] = full
        blocks = self._scheduler._blocks_of(name)
        directory = self._directory
        for number in range(first, full):
            key = request.block_hashes[number]
            if directory.find(key) is not None or directory.is_pending(key):
                continue
            page = directory.allocate(key, self._shares, now_s)
            if page is None:
                self._counts.full += full - number
                return
            step.store_blocks.append(blocks[number])
            step.store_pages.append(page)
            step.store_tags.append(directory.tag(page))
            self._use(name, [page])

    def _use(self, name: str, pages: Iterable[int]) -> None:
        used = self._used.setdefault(name, [])
        for page in pages:
            self._directory.add_user(page)
            used.append(page)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a task; its pages stay until others need them."""
        self._withdraw(request.request_id)
        self._stored.pop(request.request_id, None)
        self._directory.remove_users(self._used.pop(request.request_id, ()))
        return False, None

    # ------------------------------------------------------------------ the rest of a step

    def step_is_over(self, step: HostStep | None) -> None:
        """Let the pages go that a finished step has loaded."""
        if step is not None and step.load_pages in self._loading:
            self._loading.remove(step.load_pages)
            self._directory.unpin(step.load_pages)

    def forget_steps(self) -> None:
        """Let the pages of all planned steps go: none will be finished."""
        for pages in self._loading:
            self._directory.unpin(pages)
        self._loading.clear()

    def _withdraw(self, name: str) -> None:
        offer = self._offers.pop(name, None)
        if offer is not None:
            self._directory.unpin(offer.pages)

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
        """Return True, as pages are found by what they hold."""
        return True

    def shutdown(self) -> None:
        """End with the rank."""
