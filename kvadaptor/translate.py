"""vLLM adapter: logical block ids of a group -> this rank's physical slots, in a SchedulerOutput.

A group's scheduler numbers logical blocks; every rank keeps its own table to physical slots, so
ranks never need equal block ids. Four fields of vLLM's `SchedulerOutput` carry block ids: the block
tables of new and of cached requests, block copies and blocks to zero. All are translated here.
"""

import dataclasses

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput

from kvadaptor.slot_table import SlotTable


def translate(step: SchedulerOutput, table: SlotTable) -> SchedulerOutput:
    """Return a copy of `step` with this rank's physical slots; the original stays logical."""
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
