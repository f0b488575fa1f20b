"""What a leader publishes of its tasks for a migration: running ones, and what ended ones cached.

The engine of the next leader continues a task from its `RunningState` exactly: the tokens so far,
how many of them have KV, and the block hashes. The request itself travels as the gateway's payload.
Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from coordinator.protocol.messages.gateway import PREFIXES_MAX
from coordinator.protocol.prefixes import BLOCK_TOKENS

Blocks = npt.NDArray[np.int64]
"""Logical block numbers of a scheduler."""

_decode_tokens = msgspec.msgpack.Decoder(list[int]).decode


@dataclass(frozen=True, slots=True, eq=False)
class StateChange:
    """What a task has got since a `RunningState` of it, while its blocks stayed the same."""

    tokens: list[int]
    hashes: list[bytes]
    computed: int
    settled: int
    prefill_stats: Any


@dataclass(frozen=True, slots=True, eq=False)
class RunningState:
    """A running task; `blocks` (m,) hold its KV, or will after the in-flight step or later ones.

    `computed` tokens have KV after that step, `settled` of them have it now. `generated`, and those
    `since`, are the `count` tokens as of now. Most are encoded, because that is by far the quickest
    form to transfer.
    """

    task: str
    generated: bytes
    count: int
    computed: int
    settled: int
    blocks: Blocks
    hashes: list[bytes]
    prefill_stats: Any
    preemptions: int = 0
    """How often it has lost its blocks in this group: between two losses, full ones stay true."""
    since: list[int] = field(default_factory=list)
    priority: int = 0
    """vLLM's; that of a batch task that was placed for its age is not its tier's."""

    def tokens(self, first: int = 0) -> list[int]:
        """Return the generated tokens from this one on."""
        known = self.count - len(self.since)
        if first >= known:
            return self.since[first - known :]
        return _decode_tokens(self.generated)[first:] + self.since

    def later(self, progress: StateChange) -> "RunningState":
        """Return the state of the task with what it has got since."""
        return RunningState(
            self.task,
            self.generated,
            self.count + len(progress.tokens),
            progress.computed,
            progress.settled,
            self.blocks,
            self.hashes + progress.hashes,
            progress.prefill_stats,
            self.preemptions,
            self.since + progress.tokens,
            self.priority,
        )

    def full_blocks(self, block_tokens: int, written: Blocks) -> Blocks:
        """Return the first blocks that are full, up to one that the in-flight step writes.

        It may write them for another task, of which this one has hit them in the same step.
        """
        blocks = self.blocks[: self.settled // block_tokens]
        is_written = np.isin(blocks, written)
        return blocks[: int(is_written.argmax())] if is_written.any() else blocks


@dataclass(frozen=True, slots=True, eq=False)
class CachedChain:
    """Cached blocks of a finished request; `hashes` has one entry per block.

    `prefixes` are the keys by which the coordinator knows the beginning of its prompt.
    """

    blocks: Blocks
    hashes: list[bytes]
    prefixes: tuple[int, ...] = ()

    def prefix_in(self, blocks: Blocks, block_tokens: int) -> "CachedChain":
        """Return the part of the chain that these blocks at a new place hold."""
        known = blocks.size * block_tokens // BLOCK_TOKENS
        return CachedChain(blocks, self.hashes[: blocks.size], self.prefixes[:known])


def prefixes_of(chains: Iterable[CachedChain]) -> tuple[int, ...]:
    """Return the prefixes to report to the coordinator, oldest first, at most what it keeps."""
    known = dict.fromkeys(each for chain in chains for each in chain.prefixes)
    return tuple(known)[-PREFIXES_MAX:]
