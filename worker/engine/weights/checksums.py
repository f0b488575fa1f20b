"""Checksums of weights in memory: computed where the weights lie, compared between ranks.

A wrong copy of a weight gives fluent garbage and no error. So a lender names the checksum of what
it lends, and a borrower compares it with what has arrived.
"""

from collections.abc import Iterable, Sequence

import torch

WORD_BYTES = 8
ROW_WORDS = 4096
"""Words in a row of the grid whose rows and columns are added up."""


def checksum(raw: torch.Tensor) -> torch.Tensor:
    """Return the checksum of memory, (bytes,) int8, in whole words: int64, 0-dimensional, there.

    The words form a grid. Sums of its rows and of its columns, modulo 2^64, are added up with
    weights that differ by place, so words in another place show as well as other words. Nothing
    waits for the device.
    """
    assert raw.numel() % WORD_BYTES == 0, "memory of weights consists of whole words."
    words = raw.view(torch.int64)
    even = words.numel() // ROW_WORDS * ROW_WORDS
    grid, tail = words[:even].view(-1, ROW_WORDS), words[even:]
    rows = torch.cat((grid.sum(1), tail.sum().view(1)))
    columns = grid.sum(0)
    columns[: tail.numel()] += tail
    # The factor of each word is odd, so no other word in its place has its product.
    return _weighted(rows) * 2 + _weighted(columns)


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    """Return the sum of (n,) int64, each times an odd number of its place, modulo 2^64."""
    places = torch.arange(1, 2 * len(sums), 2, device=sums.device)
    # Products of small places alone would leave the upper bits of few small words empty.
    return (sums * (places * 0x9E3779B97F4A7C1 + 2)).sum()


def numbers_of(sums: Iterable[torch.Tensor]) -> list[int]:
    """Return checksums as numbers, after one wait for their device."""
    listed: Sequence[torch.Tensor] = list(sums)
    return torch.stack(tuple(listed)).tolist() if listed else []
