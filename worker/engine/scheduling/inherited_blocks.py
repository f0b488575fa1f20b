"""vLLM adapter: a scheduler's tasks hit blocks that the process before this one has filled."""

from collections.abc import Mapping

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from worker.engine.scheduling.handover import CACHE_GROUP, reuse_last
from worker.engine.scheduling.scheduler import ModeScheduler


def inherit_blocks(scheduler: ModeScheduler, keys: Mapping[int, bytes]) -> list[int]:
    """Let tasks hit these blocks, by their padded hashes, as if it had filled them itself.

    It passes over blocks that are not granted, or that a migration has used. Returns those that can
    be hit, which are in the directory from now on. vLLM reuses them after all blocks that hold
    nothing, and beginnings of prompts last, as these mostly have the lowest numbers.
    """
    pool = scheduler.kv_cache_manager.block_pool
    hash_of = get_hash_fn_by_name(scheduler.cache_config.prefix_caching_hash_algo)
    hash_bytes = len(hash_of(None))
    found = []
    for number, key in sorted(keys.items(), reverse=True):
        block = pool.blocks[number]
        if not scheduler.grants.has(number) or block.ref_cnt or block.block_hash is not None:
            continue
        cached = make_block_hash_with_group_id(BlockHash(key[:hash_bytes]), CACHE_GROUP)
        # Not as a watched pool does, which enters few blocks after each step: these are full.
        BlockPool._insert_block_hash(pool, cached, block, num_tokens=None)
        found.append(number)
    reuse_last(pool, found)
    if scheduler.entries is not None:
        directory = scheduler.entries.directory
        directory.fill(found, [keys[number] for number in found])
        directory.release(found)
    return found
