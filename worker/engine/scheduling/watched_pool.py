"""vLLM adapter: a block pool that enters its full blocks into the directory of the group.

vLLM gives a block its hash when it plans the step that fills it. The entry follows when that step
is over, so readers find the content after the loss of a rank.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, get_block_hash
from vllm.v1.core.sched.output import SchedulerOutput

from kvadaptor.group_directory import GroupDirectory

ENTRIES_PER_STEP = 512
"""Maximum entries after one step; a migrated long context is entered over several."""


class BlockEntries:
    """The entries of one scheduler's blocks: those to come, and those in the directory."""

    def __init__(self, directory: GroupDirectory) -> None:
        self.directory = directory
        self._planned: dict[int, bytes] = {}
        """Blocks that got a hash since the last step was planned, and their hashes."""
        self._steps: dict[int, dict[int, bytes]] = {}
        """The same of each step that is under way, by the identity of its plan."""

    def add(self, block: int, key: bytes) -> None:
        """Enter a block after the step that is planned next."""
        self._planned[block] = key

    def remove(self, block: int) -> None:
        """Remove a block's entry: it will get other content."""
        self.directory.clear(block)
        if self._planned or self._steps:
            for each in (self._planned, *self._steps.values()):
                each.pop(block, None)

    def step_is_planned(self, output: SchedulerOutput) -> None:
        """Count the blocks since then for this step."""
        if self._planned:
            self._steps[id(output)] = self._planned
            self._planned = {}

    def step_is_over(self, output: SchedulerOutput, *, is_void: bool = False) -> None:
        """Enter the blocks of a step that has ended, unless something that it read is void."""
        filled = self._steps.pop(id(output), None)
        if filled is None or is_void:
            return
        later = list(filled.items())[ENTRIES_PER_STEP:]
        for block, key in later:
            del filled[block]
            self._planned.setdefault(block, key)
        self.directory.fill(list(filled), list(filled.values()))

    def withdraw(self) -> None:
        """Enter no block that got a hash until now: its group is left, and may lose the block."""
        self._steps.clear()
        self._planned.clear()

    def forget_steps(self) -> None:
        """Enter nothing of the steps that are under way: the group is lost."""
        self.withdraw()
        self.directory.freeze()


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
