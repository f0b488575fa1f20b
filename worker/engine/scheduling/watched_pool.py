"""vLLM adapter: a block pool that enters its full blocks into the directory of the group.

vLLM gives a block its hash when it plans the step that fills it.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, get_block_hash

from kvadaptor.group_directory import GroupDirectory
from worker.engine.scheduling.block_entries import BlockEntries


class WatchedPool(BlockPool):
    """vLLM's block pool, whose hashes are entered. Made of an existing pool by `watch`."""

    entries: BlockEntries

    def _insert_block_hash(
        self,
        block_hash_with_group_id: BlockHashWithGroupId,
        block: KVCacheBlock,
        num_tokens: int | None,
    ) -> None:
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        self.entries.add(block.block_id, get_block_hash(block_hash_with_group_id))

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
    entries = BlockEntries(directory)
    pool.__class__ = WatchedPool
    pool.entries = entries
    return entries
