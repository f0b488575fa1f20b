"""vLLM adapter: which blocks of a mode's block pool may be allocated."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool

from worker.engine.scheduling.handover import forget_hashes


class BlockGrants:
    """The blocks of a vLLM block pool that may be allocated; at first none.

    Invariant: a granted block is in vLLM's free queue or used by a task. Parking leaves the queue
    as it is, because nothing allocates from it while the mode is unbound. The next grant is mostly
    the same, so only the difference moves: a switch costs array operations, not a walk over all
    blocks.
    """

    def __init__(self, pool: BlockPool, slots_per_page: int) -> None:
        self._pool = pool
        self.slots_per_page = slots_per_page
        blocks = len(pool.blocks)
        self._granted: npt.NDArray[np.bool_] = np.zeros(blocks, dtype=np.bool_)
        self._in_use: npt.NDArray[np.bool_] = np.zeros(blocks, dtype=np.bool_)
        self.parked_indices: npt.NDArray[np.int64] | None = None
        """Lease indices that tasks held when the mode was parked; None: it was granted since."""
        self._bundles: list[npt.NDArray[np.int64]] = []
        """Sets of lease indices whose blocks a migration interleaved: kept or freed as one."""
        self._aside: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Lease indices that no task gets, as copies go there."""
        pool.free_block_queue.popleft_n(pool.free_block_queue.num_free_blocks)
        self._count()

    @property
    def free(self) -> int:
        """Granted blocks that are free."""
        return int(self._pool.get_num_free_blocks())

    @property
    def total(self) -> int:
        """Granted blocks."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def reach(self) -> int:
        """Granted blocks, with those that tasks get back once copies are over."""
        return self.total + self._aside.size * self.slots_per_page

    def withdraw(self, in_use: Iterable[int]) -> npt.NDArray[np.int64]:
        """Park: forget what free blocks cache, as their pages go elsewhere.

        `in_use` are the blocks of the tasks that stay; returns the lease indices that they hold. A
        free block keeps its old hash. That finds nothing in the new map and is reset on allocation,
        so the cost depends on the tasks, not on all that was cached.
        """
        held = list(in_use)
        cached = BlockHashToBlockMap()
        for block in map(self._pool.blocks.__getitem__, held if self._pool.enable_caching else ()):
            if block.block_hash is not None:
                cached.insert(block.block_hash, block)
        self._pool.cached_block_hash_to_block = cached
        self._in_use[:] = False
        self._in_use[held] = True
        is_held = np.zeros(self.indices, dtype=np.bool_)
        is_held[np.flatnonzero(self._in_use) // self.slots_per_page] = True
        self._bundles = [each for each in self._bundles if is_held[each].any()]
        for each in self._bundles:
            is_held[each] = True
        self.parked_indices = found = np.flatnonzero(is_held)
        return found

    def bundle(self, indices: npt.NDArray[np.int64]) -> None:
        """Keep these lease indices, which a migration has filled, together."""
        if indices.size:
            self._bundles.append(indices)

    def set_aside(self, pages: int) -> npt.NDArray[np.int64]:
        """Keep this many lease indices from tasks, if their blocks are free; return all of them.

        Takes those that vLLM would use next, so that cached blocks stay as long as possible. The
        blocks of a bundle share pages with other blocks, so none of it is taken.
        """
        found: list[int] = []
        free = np.zeros(self.indices, dtype=np.int64)
        for each in self._bundles:
            free[each] = -self.slots_per_page
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        while block is not None and block.block_id >= 0 and self._aside.size + len(found) < pages:
            index = block.block_id // self.slots_per_page
            free[index] += 1
            if free[index] == self.slots_per_page:
                found.append(index)
            block = block.next_free_block
        if found:
            numbers = self.blocks_of(found)
            if self._pool.enable_caching:
                forget_hashes(self._pool, numbers.tolist())
            wanted = self._granted.copy()
            wanted[numbers] = False
            self._set(wanted)
            self._aside = np.sort(np.append(self._aside, found))
        return self._aside

    @property
    def aside(self) -> npt.NDArray[np.int64]:
        """The lease indices that are set aside."""
        return self._aside

    def give_back(self) -> None:
        """Let tasks have all that is set aside."""
        wanted = self._granted.copy()
        wanted[self.blocks_of(self._aside)] = True
        self._aside = self._aside[:0]
        self._set(wanted)

    def blocks_of(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the blocks of these lease indices."""
        first = np.asarray(indices, dtype=np.int64)[:, np.newaxis] * self.slots_per_page
        blocks: npt.NDArray[np.int64] = (first + np.arange(self.slots_per_page)).reshape(-1)
        return blocks

    @property
    def indices(self) -> int:
        """The number of possible lease indices, including the null page's."""
        return int(self._granted.size) // self.slots_per_page

    def extend(self, indices: npt.NDArray[np.int64]) -> None:
        """Allow tasks to take blocks of these lease indices; the next grant makes it exact.

        Nothing is allocated before that, so blocks of earlier grants may stay in the queue.
        """
        self._set(self._granted | self._in_indices(indices))

    def grant(self, indices: npt.NDArray[np.int64]) -> None:
        """Make exactly the blocks of these lease indices allocatable.

        The blocks in use when the mode was parked must be among them.
        """
        wanted = self._in_indices(indices)
        assert not wanted[0], "the null page cannot be granted."
        assert not (self._in_use & ~wanted).any(), "a task holds a block that is not granted."
        self._aside = self._aside[:0]
        self._set(wanted)

    def has(self, block: int) -> bool:
        """Return whether a block is granted."""
        return bool(self._granted[block])

    def _in_indices(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return, per block, whether it belongs to one of these lease indices."""
        named = np.zeros(self.indices, dtype=np.bool_)
        named[indices] = True
        return np.repeat(named, self.slots_per_page)

    def _set(self, wanted: npt.NDArray[np.bool_]) -> None:
        self.parked_indices = None
        queue, blocks = self._pool.free_block_queue, self._pool.blocks
        for block_id in np.flatnonzero(self._granted & ~wanted).tolist():
            queue.remove(blocks[block_id])
        queue.append_n([blocks[i] for i in np.flatnonzero(wanted & ~self._granted).tolist()])
        self._granted = wanted
        self._count()

    def _count(self) -> None:
        # vLLM computes usage and "is anything in use" from this number; block 0 is its null block.
        self._pool.num_gpu_blocks = int(np.count_nonzero(self._granted)) + 1
