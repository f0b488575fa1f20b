"""vLLM adapter: a scheduler's tasks hit blocks that the process before this one has filled."""

from collections.abc import Mapping

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from worker.engine.scheduling.handover import CACHE_GROUP
from worker.engine.scheduling.scheduler import ModeScheduler


def inherit_blocks(scheduler: ModeScheduler, keys: Mapping[int, bytes]) -> int:
    """Let tasks hit these blocks, by their padded hashes, as if it had filled them itself.

    It passes over blocks that are not granted, or that a migration has used. Returns the number of
    those that can be hit. vLLM reuses them after all blocks that hold nothing.
    """
    pool = scheduler.kv_cache_manager.block_pool
    hash_of = get_hash_fn_by_name(scheduler.cache_config.prefix_caching_hash_algo)
    hash_bytes = len(hash_of(None))
    queue, count = pool.free_block_queue, 0
    for number, key in keys.items():
        block = pool.blocks[number]
        if not scheduler.grants.has(number) or block.ref_cnt or block.block_hash is not None:
            continue
        found = make_block_hash_with_group_id(BlockHash(key[:hash_bytes]), CACHE_GROUP)
        pool._insert_block_hash(found, block, num_tokens=None)
        queue.remove(block)
        queue.append(block)
        count += 1
    return count
