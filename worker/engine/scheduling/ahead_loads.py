"""vLLM adapter: loads into blocks that no task has yet, while the tasks of the group run on.

A waiting request whose prefix lies in host pages gets free blocks at once, and the next step lets
all members begin to load them. When the leader has them, or will have them by the end of the step
in flight, the next step that is planned lets each member wait for its own, and they are cached
blocks, which vLLM finds when it looks at the request again. Until then the blocks are held, with
those before them that the device still had.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

from worker.engine.scheduling.block_copies import BlockCopies, Taken
from worker.engine.scheduling.handover import CACHE_GROUP, forget_hashes

IDLE_S = 0.0005
"""How long an empty step waits for a load, so that a group without other tasks plans few."""

LEAD_MAX_S = 0.02
"""A step is planned to read a load that will be over after this time at most: it would have to wait
for it, if the step before it took less time than expected."""

LOADS_MAX = 8
"""Maximum loads ahead that are not over; each holds the blocks of a request that does not run."""


@dataclass(slots=True, eq=False)
class _Load:
    """What a request loads: its blocks from number `first` on, into `blocks`."""

    number: int
    first: int
    held: list[KVCacheBlock]
    """The blocks of the request before those."""
    blocks: list[KVCacheBlock]
    keys: list[BlockHash]
    places: Taken
    is_loaded: bool = False
    """Whether vLLM may hit the blocks: the next step that computes something waits for them."""
    is_awaited: bool = False
    """Whether such a step was planned: who gets the blocks later comes after the load."""
    ends_s: float = 0.0


class Loads(Protocol):
    """The loads ahead of this rank; `HostLanes` has them."""

    def is_over(self, number: int) -> bool:
        """Return whether this rank has loaded all of this number."""

    def remaining_s(self, number: int) -> float:
        """Return how long that will still take, in seconds; 0 if it is over."""

    def wait_loads(self, limit_s: float) -> None:
        """Wait for all loads that have begun, but not longer than that."""


class AheadLoads:
    """The loads ahead of one scheduler."""

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        copies: Loads,
        hold_s: float,
    ) -> None:
        """Loaded blocks are held for `hold_s` until their request is scheduled."""
        self._pool, self._size = pool, block_tokens
        self._copies, self._hold_s = copies, hold_s
        self._numbers = itertools.count()
        self._loads: dict[str, _Load] = {}
        self._unwanted: list[_Load] = []
        """Loads whose requests have ended; their blocks are written until they are over."""
        self._arrived: list[_Load] = []
        """Loads that vLLM may hit and that no step waits for yet."""
        self._last_look_s = 0.0

    def knows(self, name: str) -> bool:
        """Return whether a request has a load."""
        return name in self._loads

    def is_loading(self, name: str) -> bool:
        """Return whether a request's load is not over."""
        load = self._loads.get(name)
        return load is not None and not load.is_loaded

    @property
    def under_way(self) -> int:
        """The number of loads that are not over."""
        return sum(not load.is_loaded for load in (*self._loads.values(), *self._unwanted))

    def idle(self) -> None:
        """Wait for loads that have begun, but not longer than `IDLE_S`."""
        if self.under_way:
            self._copies.wait_loads(IDLE_S)

    def begin(
        self, request: Request, first: int, places: Taken, step: BlockCopies, tokens_max: int
    ) -> bool:
        """Load a request's blocks from `first` on with this step; return False if there is no room.

        All `places` are of one source. There must be as much as vLLM needs to schedule the request,
        which computes at most `tokens_max` tokens more in a step.
        """
        last = first + len(places)
        tokens = min(request.num_tokens, last * self._size + tokens_max)
        held = self._local(request, first)
        idle = sum(block.ref_cnt == 0 for block in held)
        if self.under_way >= LOADS_MAX or len(held) < first:
            return False
        if -(-tokens // self._size) - first + idle > self._pool.get_num_free_blocks():
            return False
        self._pool.touch(held)
        blocks = self._pool.get_new_blocks(len(places))
        keys = list(request.block_hashes[first:last])
        load = _Load(next(self._numbers), first, held, blocks, keys, places)
        self._loads[request.request_id] = load
        step.ahead.append((load.number, len(blocks)))
        source = places[0][0]
        numbers = [block.block_id for block in blocks]
        source.load_ahead(step, request.request_id, numbers, [place for _, place in places])
        return True

    def _local(self, request: Request, count: int) -> list[KVCacheBlock]:
        """Return the first blocks of a request that the device has."""
        found: list[KVCacheBlock] = []
        for key in request.block_hashes[:count]:
            block = self._pool.get_cached_block(key, [CACHE_GROUP])
            if block is None:
                break
            found += block
        return found

    def look(self, now_s: float, *, is_busy: bool = False) -> None:
        """Let requests find what has arrived, and hold nothing for longer than the limit.

        If the device `is_busy` with a step, the step that is planned next begins when that one
        ends. It may read what arrives by then: one takes about as long as from look to look.
        """
        lead_s = min(LEAD_MAX_S, now_s - self._last_look_s) if is_busy else 0.0
        self._last_look_s = now_s
        for name, load in list(self._loads.items()):
            if not load.is_loaded and self._copies.remaining_s(load.number) <= lead_s:
                self._arrive(load)
                load.ends_s = now_s + self._hold_s
            elif load.is_loaded and now_s > load.ends_s:
                self.release(name)
        for load in [load for load in self._unwanted if self._is_written(load)]:
            self._unwanted.remove(load)
            if not load.is_loaded:
                self._arrive(load)
            self._free(load)

    def _is_written(self, load: _Load) -> bool:
        """Return whether nothing writes to a load's blocks before what gets them next."""
        return load.is_awaited or self._copies.is_over(load.number)

    def _arrive(self, load: _Load) -> None:
        load.is_loaded = True
        self._arrived.append(load)
        for number, (block, key) in enumerate(zip(load.blocks, load.keys, strict=True), 1):
            cached = make_block_hash_with_group_id(key, CACHE_GROUP)
            tokens = (load.first + number) * self._size
            self._pool._insert_block_hash(cached, block, num_tokens=tokens)

    def await_arrived(self, step: BlockCopies) -> tuple[Taken, list[int]]:
        """Let a step, which computes something, wait for what it may read.

        Returns what the loads read, to be kept until the step is over, and their blocks.
        """
        arrived, self._arrived = self._arrived, []
        for load in arrived:
            load.is_awaited = True
        step.awaits += [load.number for load in arrived]
        places = [place for load in arrived for place in load.places]
        return places, [block.block_id for load in arrived for block in load.blocks]

    def release(self, name: str) -> None:
        """Hold a request's blocks no more: it has them, or has ended, or waits for others."""
        load = self._loads.pop(name, None)
        if load is None:
            return
        if load.is_loaded and self._is_written(load):
            self._free(load)
        else:
            self._unwanted.append(load)

    def _free(self, load: _Load) -> None:
        # As when vLLM frees a request, its last block is reused first.
        self._pool.free_blocks(reversed([*load.held, *load.blocks]))

    def end(self) -> Iterator[Taken]:
        """Give up all loads, as their copies were stopped; yield what they kept."""
        for load in (*self._loads.values(), *self._unwanted):
            self._free(load)
            if not load.is_loaded:
                yield load.places
        for load in self._arrived:
            # Other members may still copy, and nothing keeps the pages from now on.
            forget_hashes(self._pool, [block.block_id for block in load.blocks])
            yield load.places
        self._loads.clear()
        self._unwanted.clear()
        self._arrived.clear()
