"""vLLM adapter: moves a running task, with its KV blocks, from one scheduler to another.

Four things make the continuation exact: the tokens so far, how many of them have KV, the block
hashes, and the request itself. The rest follows: draws depend on (seed, position) alone, penalties
on the tokens, and a grammar is fed the tokens again. vLLM accepts such a task natively, like one
whose KV came from a connector: waiting, with computed tokens and its own blocks.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.request import Request

from coordinator.protocol.prefixes import prefix_hashes
from worker.rank.task_state import Blocks, CachedChain, RunningState

CACHE_GROUP = 0
"""A mode has one KV cache group, so blocks hash alike in all modes."""

REMEMBERED_CHAINS_MAX = 4096
"""Maximum finished requests whose cached blocks are still tracked, the newest ones."""

_NO_BLOCKS = np.zeros(0, dtype=np.int64)


class FinishedChains:
    """The block hashes of the last finished requests, in order."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chains: OrderedDict[bytes, CachedChain] = OrderedDict()

    def remember(self, hashes: Sequence[bytes], prefixes: tuple[int, ...]) -> None:
        """Add a finished request with these block hashes; a repeated one becomes the newest."""
        if not hashes:
            return
        self._chains[hashes[-1]] = CachedChain(_NO_BLOCKS, list(hashes), prefixes)
        self._chains.move_to_end(hashes[-1])
        while len(self._chains) > REMEMBERED_CHAINS_MAX:
            self._chains.popitem(last=False)

    def remember_request(self, request: Request) -> None:
        """Add a request that has just finished."""
        if request.block_hashes:
            prefixes = prefix_hashes(request.prompt_token_ids or (), request.cache_salt)
            self.remember(request.block_hashes, prefixes)

    def cached(self, pool: BlockPool, blocks_max: int) -> list[CachedChain]:
        """Return the chains that are still cached, newest first, of at most `blocks_max` blocks."""
        chains: list[CachedChain] = []
        block_ids: set[int] = set()
        find = pool.cached_block_hash_to_block.get_one_block
        for chain in reversed(self._chains.values()):
            blocks: list[int] = []
            for block_hash in chain.hashes:
                found = find(make_block_hash_with_group_id(BlockHash(block_hash), CACHE_GROUP))
                if found is None:
                    break
                blocks.append(found.block_id)
            fresh = set(blocks) - block_ids
            if not fresh:
                continue
            if len(block_ids) + len(fresh) > blocks_max:
                break
            block_ids |= fresh
            chains.append(chain.prefix_in(np.array(blocks, dtype=np.int64), self._block_tokens))
        return chains

    def clear(self) -> None:
        """Forget all chains: nothing is cached any more."""
        self._chains.clear()


def running_state(
    request: Request,
    block_ids: Sequence[int],
    block_tokens: int,
    loading: Collection[int] = (),
) -> RunningState:
    """Return what another scheduler needs to continue a task after the in-flight step.

    That step also loads the blocks `loading`.
    """
    computed = request.num_computed_tokens
    settled = computed - request.num_in_flight_tokens
    if loading:
        # vLLM counts loaded tokens as computed when it plans the step.
        first = next((n for n, block in enumerate(block_ids) if block in loading), settled)
        settled = min(settled, first * block_tokens)
    blocks = np.array(block_ids, dtype=np.int64)
    return RunningState(
        request.request_id,
        msgspec.msgpack.encode(request._output_token_ids),
        len(request._output_token_ids),
        computed,
        settled,
        blocks,
        list[bytes](request.block_hashes),
        request.prefill_stats,
        request.num_preemptions,
        priority=request.priority,
    )


def restore(request: Request, state: RunningState, hasher: Any) -> None:
    """Bring a request to `state`; it is fresh, or was restored to an older one."""
    request._block_hasher = None  # The state has the hashes.
    request.append_output_token_ids(state.tokens(request.num_output_tokens))
    request.num_computed_tokens = state.computed
    request.priority = state.priority
    request.prefill_stats = state.prefill_stats
    if request.sampling_params is not None and state.computed >= request.num_prompt_tokens:
        request.sampling_params.prompt_logprobs = None  # Already reported.
    request.block_hashes = cast("list[BlockHash]", state.hashes.copy()) if hasher else []
    request._block_hasher = hasher


def tokens_of(request: Request) -> npt.NDArray[np.int32]:
    """Return all token ids of a request, the prompt's first."""
    return np.array(request._all_token_ids, dtype=np.int32)


def go_on(request: Request, tokens: Sequence[int]) -> None:
    """Append to a restored request the tokens of the step in flight at its publication."""
    if tokens:
        request.append_output_token_ids(list(tokens))
        request.prefill_stats = None  # They went out with the first token.


def take_blocks(manager: KVCacheManager, tasks: Iterable[tuple[Request, Blocks]]) -> None:
    """Give granted blocks, with their KV, to the requests of these tasks.

    Blocks shared with an earlier task get one more reference. vLLM takes full blocks for
    registered; `register_blocks` does that later, as it costs a microsecond per block.
    """
    pool = manager.block_pool
    (only,) = manager.coordinator.single_type_managers
    for request, blocks in tasks:
        taken = [pool.blocks[number] for number in blocks.tolist()]
        # Not a watched pool's own: no block that has just been filled has an entry to change.
        if pool.metrics_collector:
            BlockPool.touch(pool, taken)
        else:
            touch(pool, taken)
        name = request.request_id
        only.req_to_blocks[name] = taken
        if manager.enable_caching:
            only.num_cached_block[name] = request.num_computed_tokens // only.block_size


def touch(pool: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
    """Do as vLLM's `touch` without a call for each block: a switch takes thousands."""
    queue, count = pool.free_block_queue, 0
    for block in blocks:
        if not block.ref_cnt:
            before, after = block.prev_free_block, block.next_free_block
            before.next_free_block, after.prev_free_block = after, before
            block.prev_free_block = block.next_free_block = None
            count += 1
        block.ref_cnt += 1
    queue.num_free_blocks -= count


def register_blocks(manager: KVCacheManager, request: Request) -> None:
    """Let other requests hit the full blocks of a migrated request."""
    (only,) = manager.coordinator.single_type_managers
    blocks = only.req_to_blocks.get(request.request_id, [])
    # Blocks that it shares, or has filled here, may be registered already.
    full = only.num_cached_block.get(request.request_id, 0)
    first = 0
    while first < full and blocks[first].block_hash is not None:
        first += 1
    last = first
    while last < full and blocks[last].block_hash is None:
        last += 1
    size = only.block_size
    manager.block_pool.cache_full_blocks(request, blocks, first, last, size, CACHE_GROUP)


def register_some(
    manager: KVCacheManager, come: list[Request], known: Mapping[str, Request], most: int | None
) -> None:
    """Register the blocks of the first of these requests, at most `most`, and take them out.

    Requests that are no longer `known` have ended.
    """
    for request in come[:most]:
        if known.get(request.request_id) is request:
            register_blocks(manager, request)
    del come[:most]


def forget_hashes(pool: BlockPool, blocks: Iterable[int]) -> None:
    """Remove the old hashes of blocks that are about to be filled from elsewhere.

    Usually all were withdrawn, so none can be found; resetting them takes a third of the work, and
    as vLLM's `reset_hash` does it, half of that without a call for each.
    """
    can_be_found = len(pool.cached_block_hash_to_block) or pool.cached_block_hashes_by_block
    if can_be_found or pool.metrics_collector:
        for number in blocks:
            pool._maybe_evict_cached_block(pool.blocks[number])
    else:
        for number in blocks:
            block = pool.blocks[number]
            block._block_hash = block._block_hash_num_tokens = None


def cache_chain(pool: BlockPool, chain: CachedChain, block_tokens: int) -> None:
    """Register the carried blocks of a finished request; they are free and used most recently.

    As when vLLM frees a request, its last block is reused first.
    """
    numbers = chain.blocks.tolist()
    for index, (number, block_hash) in enumerate(zip(numbers, chain.hashes, strict=True)):
        block = pool.blocks[number]
        if block.block_hash is None:
            key = make_block_hash_with_group_id(BlockHash(block_hash), CACHE_GROUP)
            pool._insert_block_hash(key, block, num_tokens=(index + 1) * block_tokens)
    reuse_last(pool, reversed(numbers))


def reuse_last(pool: BlockPool, numbers: Iterable[int]) -> None:
    """Let vLLM reuse these blocks after all others, in this order, if they are free."""
    queue = pool.free_block_queue
    for number in numbers:
        block = pool.blocks[number]
        if block.ref_cnt == 0:
            queue.remove(block)
            queue.append(block)
