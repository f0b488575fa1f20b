"""vLLM adapter: logical block ids of a group -> this rank's physical slots, in a SchedulerOutput.

A group's scheduler numbers logical blocks; every rank keeps its own table to physical slots, so
ranks never need equal block ids. Four fields of vLLM's `SchedulerOutput` carry block ids: the block
tables of new and of cached requests, block copies and blocks to zero. All are translated here.
"""

import dataclasses
from collections.abc import Sequence
from copy import copy
from itertools import accumulate, chain, pairwise

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput

from kvadaptor.slot_table import SlotTable

_Blocks = tuple[list[int], ...]
"""The blocks of one task, by KV cache group."""


def translate(step: SchedulerOutput, table: SlotTable) -> SchedulerOutput:
    """Return a copy of `step` with this rank's physical slots; the original stays logical."""
    new = [copy(request) for request in step.scheduled_new_reqs]
    for request, slots in zip(new, _slots([each.block_ids for each in new], table), strict=True):
        assert slots is not None
        request.block_ids = slots
    cached = step.scheduled_cached_reqs
    new_blocks = _slots(cached.new_block_ids, table)
    copies = step.kv_cache_block_copies
    zero = step.new_block_ids_to_zero
    return dataclasses.replace(
        step,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=dataclasses.replace(cached, new_block_ids=new_blocks),
        kv_cache_block_copies=_translate_copies(copies, table) if copies else copies,
        new_block_ids_to_zero=table.slots(zero) if zero else zero,
    )


def _slots(tasks: Sequence[_Blocks | None], table: SlotTable) -> list[_Blocks | None]:
    """Translate the blocks of all tasks at once: after a switch all are new, and streams wait."""
    groups = [ids for each in tasks if each is not None for ids in each]
    slots, ends = table.slots([*chain.from_iterable(groups)]), accumulate(map(len, groups))
    parts = iter([slots[start:end] for start, end in pairwise((0, *ends))])
    return [None if each is None else tuple(next(parts) for _ in each) for each in tasks]


def _translate_copies(copies: list[KVCacheBlockCopy], table: SlotTable) -> list[KVCacheBlockCopy]:
    sources = table.slots([copy.src_block_id for copy in copies])
    targets = table.slots([copy.dst_block_id for copy in copies])
    return [KVCacheBlockCopy(*pair) for pair in zip(sources, targets, strict=True)]
