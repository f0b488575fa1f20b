"""The Triton kernel that copies units of KV memory, on this device or from peers over NVLink.

All addresses are distances from one base pointer in 16-byte words. So the compiler can prove that
every access is 16 bytes wide, and the kernel also runs in Triton's interpreter.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

WORD_BYTES = 16


# The number of copies differs in each call: compiling a kernel per number would stall it.
@triton.jit(do_not_specialize=["num_copies", "num_tiles"])  # type: ignore[untyped-decorator]
def _copy_units(  # type: ignore[no-untyped-def]
    base,
    table,
    num_copies,
    num_tiles,
    words: tl.constexpr,
    tile_words: tl.constexpr,
    tile_copies: tl.constexpr,
):
    # Copies vary fastest and layers slowest: concurrent copies lie in one layer, which touches few
    # memory pages of each rank.
    tiles = tl.cdiv(num_copies, tile_copies)
    chunks: tl.constexpr = (words + tile_words - 1) // tile_words
    for number in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = number % tiles
        chunk = number // tiles % chunks
        layer = (number // tiles // chunks).to(tl.int64)
        copy = tile * tile_copies + tl.arange(0, tile_copies)
        inside = copy < num_copies
        source = tl.load(table + copy, mask=inside, other=0)
        source += layer * tl.load(table + num_copies + copy, mask=inside, other=0)
        target = tl.load(table + 2 * num_copies + copy, mask=inside, other=0)
        target += layer * tl.load(table + 3 * num_copies + copy, mask=inside, other=0)
        half = chunk * (2 * tile_words) + tl.arange(0, 2 * tile_words)
        mask = inside[:, None] & (half < 2 * words)[None, :]
        values = tl.load(base + (source * 2)[:, None] + half[None, :], mask=mask)
        tl.store(base + (target * 2)[:, None] + half[None, :], values, mask=mask)


@dataclass(frozen=True, slots=True)
class Shape:
    """The division of a launch into programs."""

    tile_words: int = 4096
    """16-byte words in flight per program: 64 KiB."""
    programs: int = 64
    """Programs that share the tiles, so that an in-flight step keeps half of the multiprocessors.

    A program per tile would stop the step for as long as the copies take: they run first, and a
    matrix product leaves no room for both on a multiprocessor. 1 MiB in flight fills NVLink, but
    beside a step, which uses the same memory, it takes four times that.
    """
    warps: int = 32
    """Warps of a program."""


def launch(
    base: Any, table: Any, num_copies: int, num_layers: int, unit_words: int, shape: Shape
) -> None:
    """Copy units of `unit_words` 16-byte words in every layer, on the current stream.

    `base` is any int64 tensor, 16-byte aligned. `table` is (4·num_copies,) int64 on the device, all
    in words: where the sources lie in layer 0, relative to `base`; the distance of their layers;
    and the same two of the targets. No source may be a target. At most 2**31 tiles.
    """
    tile = min(triton.next_power_of_2(unit_words), shape.tile_words)
    tile_copies = shape.tile_words // tile
    tiles = triton.cdiv(num_copies, tile_copies) * triton.cdiv(unit_words, tile) * num_layers
    _copy_units[(min(tiles, shape.programs),)](
        *(base, table, num_copies, tiles),
        words=unit_words,
        tile_words=tile,
        tile_copies=tile_copies,
        num_warps=shape.warps,
    )
