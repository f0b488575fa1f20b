"""A rank's access to the cell's KV pages in host memory: it copies its heads of whole blocks.

On CPU a rank copies within the step that loads or fills the blocks, so a block whose tokens a
client has seen is in the host page even if the rank ends with its next instruction.
"""

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvadaptor.geometry import PageGeometry
from kvadaptor.host.directory import HostDirectory
from kvadaptor.host.layout import HostLayout, layout_of
from kvadaptor.slot_table import SlotTable
from kvadaptor.views import KVBuffer
from worker.engine.scheduling.block_copies import BlockCopies
from worker.rank.step_times import StepTimes

Bytes = npt.NDArray[np.uint8]

TRIAL_BLOCKS = 16
"""Blocks that the trial at start-up copies."""


class TimedMode(Protocol):
    """A prepared mode whose steps were measured."""

    @property
    def width(self) -> int:
        """The members of its groups."""

    @property
    def times(self) -> StepTimes:
        """The step times of the start-up."""


@dataclass(slots=True)
class HostTier:
    """The host pages as one rank sees them, and what it counts of them since it started."""

    directory: HostDirectory
    geometry: PageGeometry
    pages: Bytes
    """(pages, layers, bytes of a page in one layer)."""
    kv: Bytes
    """The rank's own KV memory, (layers, bytes of one layer)."""
    stored_bytes: int = 0
    loaded_bytes: int = 0
    hit_tokens: int = 0
    full: int = 0
    load_us_per_token: float = 0.0

    @property
    def layout(self) -> HostLayout:
        """The sizes of the shared memory."""
        return self.directory.layout

    def copies(
        self, step: BlockCopies, width: int, member: int, table: SlotTable | None
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return two calls for a member of a group: before the step computes, and afterwards.

        The slots are those of now.
        """
        slots = self.geometry.slots_per_page(width)
        share = member * slots // width
        is_writer = member * slots % width == 0  # Of ranks with the same head, the first writes.
        loads, stores = step.load_blocks, step.store_blocks
        if table is not None:
            loads, stores = table.slots(loads), table.slots(stores)

        def load() -> None:
            if loads:
                self._load(slots, share, loads, step.load_pages)

        def store() -> None:
            if stores and is_writer:
                self._store(slots, share, stores, step.store_pages)
                for page, tag in zip(step.store_pages, step.store_tags, strict=True):
                    self.directory.complete(page, share, tag)

        return load, store

    def _load(self, slots: int, share: int, numbers: Sequence[int], pages: Sequence[int]) -> None:
        own, host = self._views(slots)
        own[:, list(numbers)] = host[list(pages), :, share].transpose(1, 0, 2)
        self.loaded_bytes += len(pages) * self.geometry.page_bytes // slots

    def _store(self, slots: int, share: int, numbers: Sequence[int], pages: Sequence[int]) -> None:
        own, host = self._views(slots)
        host[list(pages), :, share] = own[:, list(numbers)].transpose(1, 0, 2)
        self.stored_bytes += len(pages) * self.geometry.page_bytes // slots

    def _views(self, slots: int) -> tuple[Bytes, Bytes]:
        """Return (layers, slots of all pages, bytes) of the rank's KV, and the pages by share."""
        layers, slot_bytes = self.kv.shape[0], self.geometry.layer_page_bytes // slots
        own = self.kv.reshape(layers, -1, slot_bytes)
        return own, self.pages.reshape(-1, layers, slots, slot_bytes)

    def try_loads(self) -> None:
        """Measure how long a load takes, into the rank's pages while they hold nothing."""
        count = min(TRIAL_BLOCKS, self.layout.pages_per_rank, self._own_pages())
        pages = list(self.layout.pages_of(self.directory.rank))[:count]
        self._load(1, 0, range(count), pages)
        started_ns = time.perf_counter_ns()
        self._load(1, 0, range(count), pages)
        took_us = (time.perf_counter_ns() - started_ns) / 1e3
        self.load_us_per_token = took_us / (count * self.geometry.tokens_per_slot)
        self.kv[:, : count * self.geometry.layer_page_bytes] = 0
        self.loaded_bytes = 0

    def is_sooner(self, mode: TimedMode, tokens: int) -> bool:
        """Return whether a group loads this many tokens of one task sooner than it computes them.

        Each member loads its share of the heads.
        """
        load_us = self.load_us_per_token * tokens / mode.width
        curves = mode.times.curves.values()
        return all(load_us < curve.us(tokens) for curve in curves)

    def totals(self) -> tuple[tuple[str, int], ...]:
        """Return the gauges and totals of this rank's part."""
        return (
            ("host_pages", self.layout.pages_per_rank),
            ("host_pages_used", self.directory.used_pages),
            ("host_stored_bytes", self.stored_bytes),
            ("host_loaded_bytes", self.loaded_bytes),
            ("host_hits", self.hit_tokens),
            ("host_full_blocks", self.full),
        )

    def _own_pages(self) -> int:
        return int(self.kv.shape[1]) // self.geometry.layer_page_bytes


def open_tier(memory: mmap.mmap, ranks: int, rank: int, kv: KVBuffer) -> HostTier:
    """Open the host pages that all ranks of a cell share; raises `HostMemoryError`."""
    layout = layout_of(len(memory), ranks, kv.geometry.page_bytes)
    directory = HostDirectory(memoryview(memory), layout, rank, time.monotonic())
    layers, page_bytes = kv.geometry.num_layers, kv.geometry.layer_page_bytes
    count = layout.pages * layout.page_bytes
    pages = np.frombuffer(memory, np.uint8, count, layout.data_at)
    own = kv.raw.view(-1).numpy().view(np.uint8)
    return HostTier(
        directory,
        kv.geometry,
        pages.reshape(layout.pages, layers, page_bytes),
        own.reshape(layers, -1),
    )
