"""vLLM adapter: a block pool that enters its full blocks into the directory of the group.

vLLM gives a block its hash when it plans the step that fills it, or later.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, get_block_hash
from vllm.v1.request import Request

from kvadaptor.group_directory import GroupDirectory
from worker.engine.scheduling.block_entries import BlockEntries


class WatchedPool(BlockPool):
    """vLLM's block pool, whose hashes are entered. Made of an existing pool by `watch`."""

    entries: BlockEntries
    computed_tokens = 0
    """Tokens that steps before the one that is being planned compute of a task."""

    def cache_full_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Enter the blocks of a task that become full."""
        if self.entries.is_planning:
            self.computed_tokens = request.num_computed_tokens
        super().cache_full_blocks(request, *args, **kwargs)
        self.computed_tokens = 0

    def _insert_block_hash(
        self,
        block_hash_with_group_id: BlockHashWithGroupId,
        block: KVCacheBlock,
        num_tokens: int | None,
    ) -> None:
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        key = get_block_hash(block_hash_with_group_id)
        is_filled = num_tokens is not None and num_tokens <= self.computed_tokens
        self.entries.add(block.block_id, key, is_filled=is_filled)

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        self.entries.remove(block.block_id)
        was_cached: bool = super()._maybe_evict_cached_block(block)
        return was_cached

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Note that tasks hold these blocks."""
        super().touch(blocks)
        self.entries.directory.hold(block.block_id for block in blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Note which blocks no task holds any more."""
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        self.entries.directory.release(block.block_id for block in blocks if block.ref_cnt == 0)


def watch(pool: BlockPool, directory: GroupDirectory) -> BlockEntries:
    """Enter the full blocks of this pool from now on; vLLM has made the pool itself."""
    entries = BlockEntries(directory, lambda block: pool.blocks[block].ref_cnt > 0)
    pool.__class__ = WatchedPool
    pool.entries = entries
    return entries
