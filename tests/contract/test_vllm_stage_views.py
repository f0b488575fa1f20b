"""vLLM's views of a KV buffer show the slots of a pipeline stage as blocks of a dp cache."""

import dataclasses

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    create_kv_cache_views,
)

from kvadaptor.geometry import Split
from kvadaptor.views import LAYOUT, KVBuffer


@pytest.mark.parametrize("split", [Split(2, 1), Split(2, 2), Split(4, 1), Split(4, 4)], ids=str)
def test_a_block_is_the_slot_that_the_geometry_says(split: Split) -> None:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
    buffer = KVBuffer({f"layer{i}": spec for i in range(8)}, 5, torch.device("cpu"))
    dp = list(buffer.views(1).values())
    for each in dp:
        each.copy_(torch.randn(each.shape))
    slots, page_bytes = buffer.geometry.slots(split), buffer.geometry.layer_page_bytes
    tensor = KVCacheTensor(
        size=buffer.raw.numel(),
        layers=[f"layer{layer}" for layer in range(slots.layers)],
        layer_stride=buffer.num_pages * page_bytes,
        block_stride=page_bytes // slots.columns,
    )
    stage_spec = dataclasses.replace(spec, num_kv_heads=slots.heads)
    num_blocks = slots.num_blocks(buffer.num_pages)
    views = create_kv_cache_views(buffer.raw, stage_spec, num_blocks, LAYOUT, tensor, 32)
    for slot, first in enumerate(slots.first_blocks(buffer.num_pages)):
        row, column = divmod(slot, slots.columns)
        heads = slice(column * slots.heads, (column + 1) * slots.heads)
        for layer, view in enumerate(views):
            assert view.is_contiguous()
            for page in range(buffer.num_pages):
                expected = dp[row * slots.layers + layer][page, heads]
                assert torch.equal(view[first + page * slots.columns], expected)
