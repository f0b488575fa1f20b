"""A rank's access to the cell's KV pages in host memory: it copies its share of whole blocks.

On CPU a rank copies within the step that loads or fills the blocks, so a block whose tokens a
client has seen is in the host page even if the rank ends with its next instruction. On CUDA it
copies beside its steps (`HostLanes`).
"""

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog
import torch

from comm_pool.layout import Rank
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.host.directory import HostDirectory
from kvadaptor.host.layout import HostLayout, HostMemoryError, layout_of
from kvadaptor.host.page_copies import PageCopier, PageCopies
from kvadaptor.shares import share_of
from kvadaptor.slot_table import SlotTable
from kvadaptor.transfer.boxes import (
    HostCopyError,
    address_in,
    bind_device,
    fill_memory,
    register,
)
from kvadaptor.transfer.driver import DriverError
from kvadaptor.views import KVBuffer
from worker.engine.host_lanes import HostLanes, Launcher
from worker.engine.scheduling.block_copies import BlockCopies
from worker.rank.inflight_step import POLL_S
from worker.rank.step_times import StepTimes

log = structlog.get_logger()

TRIAL_BLOCKS = 16
"""Blocks that the trial at start-up copies."""

STEP_LOAD_US = 500
"""A step waits for loads of at most this time; longer ones go ahead of it."""

READY_WAIT_S = 2.0
"""How long a rank waits for its memory before it serves: a new process registers 30 GB then."""

REGISTERED_BYTES = 64 << 20
"""Host memory that CUDA registers at once: 40 ms, or 4 ms where it was used before."""


GIVE_PERIOD_S = 0.005
"""How often a rank asks others for pages, and looks at what they ask."""


class TimedMode(Protocol):
    """A prepared mode whose steps were measured."""

    @property
    def width(self) -> int:
        """The members of its groups."""

    @property
    def times(self) -> StepTimes:
        """The step times of the start-up."""


def _nothing() -> None:
    """Copy nothing."""


Calls = tuple[Callable[[], None], Callable[[], None]]
"""What a member calls before its step computes, and afterwards."""


@dataclass(slots=True)
class HostTier:
    """The host pages as one rank sees them, and what it counts of them since it started."""

    directory: HostDirectory
    geometry: PageGeometry
    loads: Launcher
    stores: Launcher
    lanes: HostLanes | None = None
    """What copies beside the steps; without it they copy themselves."""
    validity: Callable[[Sequence[Rank]], Callable[[], bool]] = lambda _: lambda: True
    """Gives a query that is true while the steps of these ranks, as of now, count."""
    stored_bytes: int = 0
    loaded_bytes: int = 0
    hit_tokens: int = 0
    full: int = 0
    load_us_per_token: float = 0.0
    register_rest: Callable[[], None] | None = None
    """Registers all memory that is not yet; None where none has to be."""
    gives_at_s: float = 0.0
    """When the rank looks next whether others want pages of its own."""
    registered_bytes: int = 0
    """Host memory that the device reaches directly; 0 on CPU."""

    @property
    def layout(self) -> HostLayout:
        """The sizes of the shared memory."""
        return self.directory.layout

    @property
    def is_aside(self) -> bool:
        """Whether copies run beside the steps."""
        return self.lanes is not None

    def copies(
        self,
        step: BlockCopies,
        ranks: Sequence[Rank],
        split: Split,
        member: int,
        table: SlotTable | None,
    ) -> Calls:
        """Return two calls for a member of a group: before the step computes, and afterwards.

        The slots are those of now.
        """
        own = share_of(self.geometry, split, member)
        share = own.number

        def of(blocks: list[int], pages: list[int]) -> PageCopies:
            numbers = blocks if table is None or not blocks else table.slots(blocks)
            return PageCopies(own.slots, share, numbers, pages)

        loads = of(step.load_blocks, step.load_pages)
        # Of ranks with the same head, the first writes.
        stores = of(step.store_blocks, step.store_pages) if own.is_first else of([], [])

        def complete() -> None:
            self.stored_bytes += self._bytes_of(stores)
            self.directory.entries.complete(step.store_pages, share, step.store_tags)

        lanes = self.lanes
        if lanes is None:
            return self._within(loads, stores, complete)

        ahead = of(step.ahead_blocks, step.ahead_pages)

        def begin() -> None:
            is_valid = self.validity(ranks)
            if stores.pages:
                lanes.store(stores, lambda: complete() if is_valid() else None)
            if step.frees_stores:
                lanes.order_stores()
                lanes.delay_loads()
            # Loads that nobody wants any more may still write to the blocks that this step loads.
            lanes.follow(step.awaits)
            if loads.pages:
                lanes.load(loads)
            first = 0
            for number, count in step.ahead:
                lanes.load_ahead(number, ahead.part(first, first + count))
                first += count
            self.loaded_bytes += self._bytes_of(loads) + self._bytes_of(ahead)

        return begin, _nothing if member == 0 else lanes.wait_stores

    def _within(self, loads: PageCopies, stores: PageCopies, complete: Callable[[], None]) -> Calls:
        def load() -> None:
            if loads.pages:
                self.loads.launch(loads)
                self.loaded_bytes += self._bytes_of(loads)

        def store() -> None:
            if stores.pages:
                self.stores.launch(stores)
                complete()

        return load, store

    def _bytes_of(self, copies: PageCopies) -> int:
        return len(copies.pages) * self.geometry.page_bytes // copies.slots.count

    def begin(self) -> None:
        """Let groups use the pages once this rank can; call it when its graphs are captured.

        Other threads may not use the driver meanwhile. Waits for `READY_WAIT_S` at most.
        """
        if self.register_rest is None:
            self.directory.set_ready(is_ready=True)
        else:
            rest = threading.Thread(target=self.register_rest, name="host-memory", daemon=True)
            rest.start()
            rest.join(READY_WAIT_S)

    def give_pages(self) -> None:
        """Give pages to ranks whose blocks are younger, now and then; see `HostDirectory.give`."""
        now_s = time.monotonic()
        if now_s >= self.gives_at_s:
            self.gives_at_s = now_s + GIVE_PERIOD_S
            self.directory.give(now_s)

    def look(self) -> None:
        """Mark what is stored by now, and go on with loads ahead; see `HostLanes`."""
        if self.lanes is not None:
            self.lanes.look()

    def step_is_over(self) -> None:
        """Wait until clients may see the tokens of a finished step; see `HostLanes`."""
        if self.lanes is not None:
            self.lanes.wait_stores()

    def order_loads(self) -> None:
        """Let what is launched from now on wait for all loads ahead; see `HostLanes`."""
        if self.lanes is not None:
            self.lanes.order_loads()

    def stop(self) -> None:
        """Leave the group: its copies end, and nothing that it was to load is read."""
        if self.lanes is not None:
            self.lanes.stop()

    def try_loads(self, pages: range) -> None:
        """Measure how long a load of these pages takes, into the first of the rank's own."""
        count = len(pages)
        whole = self.geometry.slots(Split(1, 1))
        trial = PageCopies(whole, 0, range(count), pages)
        self._load_now(trial)
        started_ns = time.perf_counter_ns()
        self._load_now(trial)
        took_us = (time.perf_counter_ns() - started_ns) / 1e3
        self.load_us_per_token = took_us / (count * self.geometry.tokens_per_slot)

    def _load_now(self, copies: PageCopies) -> None:
        copying = self.loads.launch(copies)
        while not copying.is_over():
            time.sleep(POLL_S)

    def is_sooner(self, mode: TimedMode, tokens: int) -> bool:
        """Return whether a group loads this many tokens of one task sooner than it computes them.

        Each member loads its share, and a stage compares it with its own layers' time.
        """
        load_us = self._load_us(mode, tokens)
        return bool(all(load_us < curve.us(tokens) for curve in mode.times.curves.values()))

    def goes_ahead(self, mode: TimedMode, tokens: int) -> bool:
        """Return whether a group loads this many tokens beside its steps, not within one."""
        return self.is_aside and self._load_us(mode, tokens) > STEP_LOAD_US

    def _load_us(self, mode: TimedMode, tokens: int) -> float:
        return self.load_us_per_token * tokens / mode.width

    def totals(self) -> tuple[tuple[str, int], ...]:
        """Return the gauges and totals of this rank's part."""
        return (
            ("host_pages", self.directory.own_pages),
            ("host_pages_used", self.directory.used_pages),
            ("host_registered_bytes", self.registered_bytes),
            ("host_stored_bytes", self.stored_bytes),
            ("host_loaded_bytes", self.loaded_bytes),
            ("host_hits", self.hit_tokens),
            ("host_full_blocks", self.full),
            ("host_late_blocks", self.lanes.late_blocks if self.lanes is not None else 0),
        )


def copies_aside(device: torch.device) -> bool:
    """Return whether copies run beside the steps: where other hardware than theirs does them."""
    return bool(device.type == "cuda")


def open_tier(
    memory: mmap.mmap, ranks: int, rank: int, kv: KVBuffer, *, is_optional: bool = False
) -> HostTier | None:
    """Open the host pages that all ranks of a cell share.

    The rank's KV memory is as before afterwards. `HostTier.begin` lets groups use the pages. Raises
    `HostMemoryError` if they are too few, `HostCopyError` or `DriverError` if the device cannot
    copy them; returns None instead if they are optional, and then no group of this rank uses any.
    """
    try:
        return _open_tier(memory, ranks, rank, kv)
    except (HostMemoryError, HostCopyError, DriverError) as error:
        if not is_optional:
            raise
        log.warning("host_kv_off", rank=rank, reason=str(error))
        return None


def _open_tier(memory: mmap.mmap, ranks: int, rank: int, kv: KVBuffer) -> HostTier:
    geometry, device = kv.geometry, kv.raw.device
    layout = layout_of(len(memory), ranks, geometry.page_bytes)
    directory = HostDirectory(memoryview(memory), layout, rank, time.monotonic())
    loads, stores = (_copier(memory, layout, kv, loads=is_load) for is_load in (True, False))
    # A step's own loads do not wait for those ahead of other tasks.
    loads_ahead = _copier(memory, layout, kv, loads=True)
    tier = HostTier(directory, geometry, loads, stores)
    trial = layout.pages_of(rank)[: min(TRIAL_BLOCKS, kv.num_pages)]
    if device.type == "cuda":
        _register(tier, memory, trial)
    first = kv.raw.view(geometry.num_layers, -1)[:, : len(trial) * geometry.layer_page_bytes]
    before = first.clone()  # Pages of the process before may be inherited.
    try:
        tier.try_loads(trial)
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        first.copy_(before)
    if copies_aside(device):
        s_per_byte = tier.load_us_per_token * geometry.tokens_per_slot / geometry.page_bytes / 1e6
        tier.lanes = HostLanes(loads, loads_ahead, stores, geometry.page_bytes, s_per_byte)
    if device.type == "cuda":
        tier.register_rest = partial(_register_rest, tier, memory, trial, device)
        # Without the driver, which the start needs, and in which this takes as long.
        fill = partial(fill_memory, memory, layout.data_at, layout.pages * layout.page_bytes)
        threading.Thread(target=fill, name="host-memory", daemon=True).start()
    return tier


def _copier(memory: mmap.mmap, layout: HostLayout, kv: KVBuffer, *, loads: bool) -> PageCopier:
    address = address_in(memory, layout.data_at)
    return PageCopier(address, kv.raw, kv.geometry, loads=loads)


def _register(tier: HostTier, memory: mmap.mmap, pages: range) -> None:
    """Register the memory of these pages."""
    size = tier.layout.page_bytes
    at = address_in(memory, tier.layout.data_at + pages.start * size)
    register(at, len(pages) * size)
    tier.registered_bytes += len(pages) * size


def _register_rest(tier: HostTier, memory: mmap.mmap, known: range, device: torch.device) -> None:
    """Register the memory of all other pages, in pieces, and then let groups use them."""
    layout, started = tier.layout, time.monotonic()
    at_once = max(1, REGISTERED_BYTES // layout.page_bytes)
    parts = (range(known.start), range(known.stop, layout.pages))
    bind_device(device)
    try:
        for part in parts:
            for first in range(0, len(part), at_once):
                _register(tier, memory, part[first : first + at_once])
    except HostCopyError as error:
        log.warning("host_kv_off", rank=tier.directory.rank, reason=str(error))
        return
    tier.directory.set_ready(is_ready=True)
    seconds = round(time.monotonic() - started, 1)
    log.info("host_kv_ready", rank=tier.directory.rank, pages=layout.pages, seconds=seconds)
