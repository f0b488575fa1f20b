"""Blocks of a weight that have one scale, and ranks whose borders cut them. From config.json. Pure.

Ranks view such a weight where their borders fall on those of blocks; layers are checked again when
they are made (worker/engine/weights/layers.py), as a checkpoint may leave some of them alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.protocol.model_size import ModelSize, model_size
from coordinator.protocol.stored_quantization import StoredQuantization, object_of

ONLINE_BLOCKS, ONLINE_SIZE = "fp8_per_block", 128
"""vLLM's name for quantizing a checkpoint in blocks while it is loaded, and their size."""
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore")
"""Fields that name what is not quantized."""
_PROJECTION = "_proj"
"""Part of the names of linear layers in attention and feed-forward networks."""


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a weight (outputs, inputs) that has one scale."""

    rows: int
    columns: int


def block_of(stored: StoredQuantization) -> Block | None:
    """Return the blocks of a checkpoint's weights; None if scales are of another kind.

    Raises:
        ValueError: if config.json names none that vLLM could read.
    """
    if stored.method == ONLINE_BLOCKS:
        return Block(ONLINE_SIZE, ONLINE_SIZE)
    groups = [object_of(object_of(group).get("weights")) for group in stored.groups.values()]
    structures = [each.get("block_structure") for each in groups if each.get("strategy") == "block"]
    found = stored.fields.get("weight_block_size") or next(iter(structures), None)
    if found is None:
        return None
    sizes = [each for each in _listed(found) if isinstance(each, int) and each > 0]
    if len(sizes) != 2 or len(_listed(found)) != 2:
        raise ValueError(f"{found} are not the rows and columns of a block")
    return Block(*sizes)


def cut_by(config: Mapping[str, Any], stored: StoredQuantization, width: int) -> str | None:
    """Return what the borders of ranks of this width cut, in words; None if config.json shows none.

    Raises:
        ValueError: as `block_of`.
    """
    block, size = block_of(stored), model_size(config)
    if block is None or size is None or width == 1 or size.heads % width:
        return None
    ignored = [str(name) for field in _IGNORED for name in _listed(stored.fields.get(field))]
    if any(_PROJECTION in name or name.startswith("re:") for name in ignored):
        return None
    for what, share, multiples in _shares(size, width, block):
        if any(share % each for each in multiples):
            return (
                f"width {width} gives each rank {share} {what} of a layer, which cuts blocks of "
                f"{block.rows} by {block.columns} weights with one scale"
            )
    return None


def _shares(
    size: ModelSize, width: int, block: Block
) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yield a rank's features of each kind, and what these must be multiples of.

    One layer has them as rows, and all but keys another one as columns. Experts are whole.
    """
    both = block.rows, block.columns
    yield "rows of queries", size.heads * size.head_dim // width, both
    yield "rows of keys", max(size.kv_heads, width) * size.head_dim // width, (block.rows,)
    if not size.experts:
        yield "inner features", size.inner // width, both


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
