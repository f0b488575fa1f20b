"""vLLM's views of a KV buffer show the slots of a pipeline stage as blocks of a dp cache."""

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvadaptor.geometry import Split
from kvadaptor.views import KVBuffer


@pytest.mark.parametrize("split", [Split(2, 1), Split(2, 2), Split(4, 1), Split(4, 4)], ids=str)
def test_a_block_is_the_slot_that_the_geometry_says(split: Split) -> None:
    """Every member sees its own layers, and its share of heads, in any slot of any page."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
    buffer = KVBuffer({f"layer{i}": spec for i in range(8)}, 5, torch.device("cpu"))
    dp = list(buffer.views(buffer.config(Split(1, 1))).values())
    for each in dp:
        each.copy_(torch.randn(each.shape))
    slots = buffer.geometry.slots(split)
    assert buffer.logical_config(split).num_blocks == buffer.num_pages * slots.count
    for place in range(split.width):
        config = buffer.config(split, place)
        assert config.num_blocks == slots.num_blocks(buffer.num_pages)
        views = buffer.views(config)
        first_layer = split.share_of(place) // split.tp * slots.layers
        own = [f"layer{first_layer + layer}" for layer in range(slots.layers)]
        assert list(views) == own
        for slot, first in enumerate(slots.first_blocks(buffer.num_pages)):
            row, column = divmod(slot, slots.columns)
            heads = slice(column * slots.heads, (column + 1) * slots.heads)
            for layer, view in enumerate(views.values()):
                assert view.is_contiguous()
                for page in range(buffer.num_pages):
                    expected = dp[row * slots.layers + layer][page, heads]
                    assert torch.equal(view[first + page * slots.columns], expected)


@pytest.mark.parametrize("split", [Split(1, 1), Split(1, 4), Split(2, 1), Split(4, 2)], ids=str)
def test_a_scheduler_has_the_slots_of_all_pages_and_no_more(split: Split) -> None:
    """The engine's own configuration counts blocks through the regions of all layers."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
    buffer = KVBuffer({f"layer{i}": spec for i in range(8)}, 5, torch.device("cpu"))
    logical, config = buffer.logical_config(split), buffer.config(split)
    assert logical.num_blocks == 5 * buffer.geometry.slots(split).count
    assert (config.num_blocks == logical.num_blocks) == (split.pp == 1)
    assert config.num_blocks >= logical.num_blocks
    assert logical.kv_cache_groups == config.kv_cache_groups
    assert logical.kv_cache_groups[0].kv_cache_spec.block_size == 32
