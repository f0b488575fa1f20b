"""vLLM adapter: logical block ids of a group -> this rank's physical slots, in a SchedulerOutput.

A group's scheduler numbers logical blocks; every rank keeps its own table to physical slots, so
ranks never need equal block ids. Four fields of vLLM's `SchedulerOutput` carry block ids: the block
tables of new and of cached requests, block copies and blocks to zero. All are translated here.
"""

import dataclasses

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput

UNMAPPED = -1
"""Table entry of a logical block that the rank has leased no page for."""


class SlotTable:
    """Logical block -> physical slot of one group on one rank; int32, one entry per block."""

    def __init__(self, num_pages: int, slots_per_page: int) -> None:
        self.slots_per_page = slots_per_page
        self._slots: npt.NDArray[np.int32] = np.full(
            num_pages * slots_per_page, UNMAPPED, dtype=np.int32
        )
        self._by_index = self._slots.reshape(num_pages, slots_per_page)
        self._by_index[0] = np.arange(slots_per_page)

    def map(self, indices: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> None:
        """Map lease indices to pages."""
        first = pages.astype(np.int32)[:, None] * self.slots_per_page
        self._by_index[indices] = first + np.arange(self.slots_per_page, dtype=np.int32)

    def assign(self, blocks: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        """Map logical blocks to any slots of pages that the rank has leased."""
        self._slots[blocks] = slots

    def all_slots(self) -> npt.NDArray[np.int32]:
        """The whole table, (logical blocks,), as of now; `UNMAPPED` where no page is leased."""
        return self._slots.copy()

    def unmap(self, indices: npt.NDArray[np.int64]) -> None:
        """Forget lease indices."""
        self._by_index[indices] = UNMAPPED

    def slots(self, blocks: list[int]) -> list[int]:
        """Physical slots of logical blocks; asserts that all are mapped."""
        found = self._slots[blocks]
        assert found.size == 0 or found.min() >= 0, "a step uses a block that is not leased."
        return found.tolist()  # type: ignore[no-any-return]


def translate(step: SchedulerOutput, table: SlotTable) -> SchedulerOutput:
    """A copy of `step` with this rank's physical slots; the original stays logical."""
    new = [
        dataclasses.replace(request, block_ids=tuple(table.slots(ids) for ids in request.block_ids))
        for request in step.scheduled_new_reqs
    ]
    cached = step.scheduled_cached_reqs
    new_blocks = [
        None if groups is None else tuple(table.slots(ids) for ids in groups)
        for groups in cached.new_block_ids
    ]
    copies = step.kv_cache_block_copies
    zero = step.new_block_ids_to_zero
    return dataclasses.replace(
        step,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=dataclasses.replace(cached, new_block_ids=new_blocks),
        kv_cache_block_copies=_translate_copies(copies, table) if copies else copies,
        new_block_ids_to_zero=table.slots(zero) if zero else zero,
    )


def _translate_copies(copies: list[KVCacheBlockCopy], table: SlotTable) -> list[KVCacheBlockCopy]:
    sources = table.slots([copy.src_block_id for copy in copies])
    targets = table.slots([copy.dst_block_id for copy in copies])
    return [KVCacheBlockCopy(*pair) for pair in zip(sources, targets, strict=True)]
