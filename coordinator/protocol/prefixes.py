"""What cells have seen of prompts: hashes of their first blocks, and who remembers which.

A block's hash covers every token before it, as in vLLM's prefix cache, but blocks here are of the
same size in every layout and their hashes go over the network. It is a hint for placing requests,
after the approximate prefix cache of the Gateway API Inference Extension: that a cell has seen a
block does not prove that its KV is still there. Called by gateways and the core; pure.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from coordinator.protocol.messages.gateway import PREFIXES_KEPT_MAX

BLOCK_TOKENS = 64
"""Tokens of a block; a shorter rest has no hash."""

BLOCKS_MAX = 64
"""Most blocks of a prompt that are hashed: what requests share is at their beginning."""

HASH_BYTES = 8


def prefix_hashes(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the hashes of a prompt's first blocks, each over all tokens up to its end."""
    blocks = min(len(token_ids) // BLOCK_TOKENS, BLOCKS_MAX)
    running = hashlib.blake2b(digest_size=HASH_BYTES)
    hashes = []
    for block in range(blocks):
        tokens = token_ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        running.update(array("q", tokens).tobytes())
        # Positive in msgpack's and everybody else's 64 bits.
        hashes.append(int.from_bytes(running.digest()) >> 1)
    return tuple(hashes)


class SeenPrefixes:
    """The blocks that came last; two that are told the same in the same order remember the same."""

    __slots__ = ("_hashes", "_most")

    def __init__(self, most: int = PREFIXES_KEPT_MAX) -> None:
        self._hashes: OrderedDict[int, None] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._hashes)

    def __iter__(self) -> Iterator[int]:
        """Iterate from the one that came longest ago."""
        return iter(self._hashes)

    def came(self, hashes: Iterable[int]) -> None:
        """Remember these as the newest, and forget the oldest if there are too many."""
        for each in hashes:
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > self._most:
            self._hashes.popitem(last=False)

    def matched(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's blocks, from its first one on, are remembered."""
        for index, each in enumerate(hashes):
            if each not in self._hashes:
                return index
        return len(hashes)

    def clear(self) -> None:
        """Forget everything."""
        self._hashes.clear()
