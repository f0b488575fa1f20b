"""Hashes of the first blocks of prompts, and a memory of those that a cell has read.

A block's hash covers every token before it, as in vLLM's prefix cache, but blocks here have the
same size in every layout and their hashes cross the network. A known block is a hint for placing
requests, not proof that its KV is still there. Source: the approximate prefix cache of the Gateway
API Inference Extension. Gateways and the core call this module. Pure.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from coordinator.protocol.messages.gateway import PREFIXES_MAX

BLOCK_TOKENS = 64
"""Tokens of a block; a shorter remainder has no hash."""

BLOCKS_MAX = 64
"""Blocks of a prompt that are hashed, at most: requests share their beginnings."""

HASH_BYTES = 8


def prefix_hashes(token_ids: Sequence[int], salt: str | None = None) -> tuple[int, ...]:
    """Return the hashes of a prompt's first blocks, each over all tokens up to its end.

    Prompts with different salts share no block, as in vLLM's cache.
    """
    blocks = min(len(token_ids) // BLOCK_TOKENS, BLOCKS_MAX)
    running = hashlib.blake2b((salt or "").encode("utf-8", "replace"), digest_size=HASH_BYTES)
    hashes = []
    for block in range(blocks):
        tokens = token_ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        running.update(array("q", tokens).tobytes())
        # Keep it positive as a signed 64-bit integer.
        hashes.append(int.from_bytes(running.digest()) >> 1)
    return tuple(hashes)


class PrefixHistory:
    """The newest blocks; two instances with the same input in the same order are equal."""

    __slots__ = ("_hashes", "_most")

    def __init__(self, most: int = PREFIXES_MAX) -> None:
        self._hashes: OrderedDict[int, None] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        """Return the number of remembered blocks."""
        return len(self._hashes)

    def __iter__(self) -> Iterator[int]:
        """Iterate from the oldest block to the newest."""
        return iter(self._hashes)

    def remember(self, hashes: Iterable[int]) -> None:
        """Remember these blocks as the newest, and forget the oldest above the limit."""
        for each in hashes:
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > self._most:
            self._hashes.popitem(last=False)

    def matched(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's leading blocks are remembered."""
        for index, each in enumerate(hashes):
            if each not in self._hashes:
                return index
        return len(hashes)

    def clear(self) -> None:
        """Forget everything."""
        self._hashes.clear()
