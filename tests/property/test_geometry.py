"""Slots of every split tile the memory, as layers and heads of pages and as blocks of kernels."""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvadaptor.geometry import GeometryError, PageGeometry, Split

POWERS = (1, 2, 4, 8, 16)
SPLITS = [Split(pp, tp) for pp in POWERS for tp in POWERS if pp * tp <= 16]


def geometry(layers: int, heads: int) -> PageGeometry:
    return PageGeometry(layers, heads, head_dim_k=3, head_dim_v=2, dtype_bytes=2, tokens_per_slot=4)


@st.composite
def geometries(draw: st.DrawFn, split: Split) -> PageGeometry:
    """Sizes that the split divides; with fewer heads than parts, members share them."""
    heads = draw(st.sampled_from([1, 2, 3])) * split.tp
    if draw(st.booleans()):
        heads = draw(st.sampled_from([each for each in POWERS if each <= split.tp]))
    return geometry(split.pp * draw(st.integers(1, 3)), heads)


def layers_and_heads(sizes: PageGeometry, split: Split, slot: int) -> Iterator[tuple[int, int]]:
    """Where a slot lies in its page, layer by layer and head by head."""
    columns = min(split.tp, sizes.num_kv_heads)
    layers, heads = sizes.num_layers // split.pp, sizes.num_kv_heads // columns
    for layer in range(slot // columns * layers, (slot // columns + 1) * layers):
        for head in range(slot % columns * heads, (slot % columns + 1) * heads):
            yield layer, head


@pytest.mark.parametrize("split", SPLITS, ids=str)
@given(data=st.data(), pages=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_blocks_of_all_slots_hold_every_head_once(
    split: Split, data: st.DataObject, pages: int
) -> None:
    sizes = data.draw(geometries(split))
    slots = sizes.slots(split)
    head_bytes = sizes.layer_page_bytes // sizes.num_kv_heads
    region, block_bytes = pages * sizes.layer_page_bytes, sizes.layer_page_bytes // slots.columns
    seen: Counter[int] = Counter()
    for page in range(pages):
        for slot, first in enumerate(slots.first_blocks(pages)):
            block = first + page * slots.columns
            assert block < slots.num_blocks(pages)
            starts = [
                layer * region + block * block_bytes + head * head_bytes
                for layer in range(slots.layers)
                for head in range(slots.heads)
            ]
            assert starts == [
                layer * region + page * sizes.layer_page_bytes + head * head_bytes
                for layer, head in layers_and_heads(sizes, split, slot)
            ]
            seen.update(starts)
    assert seen == Counter(range(0, pages * sizes.page_bytes, head_bytes))
    last = (slots.layers - 1) * region + slots.num_blocks(pages) * block_bytes
    assert last == pages * sizes.page_bytes, "the last block ends with the memory"


@pytest.mark.parametrize("split", SPLITS, ids=str)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_all_slots_have_the_same_bytes(split: Split, data: st.DataObject) -> None:
    sizes = data.draw(geometries(split))
    slots = sizes.slots(split)
    assert slots.count == slots.rows * slots.columns <= split.width
    held = slots.layers * slots.heads * sizes.layer_page_bytes // sizes.num_kv_heads
    assert held * slots.count == sizes.page_bytes


@pytest.mark.parametrize("k", POWERS)
@given(data=st.data(), pages=st.integers(1, 50))
@settings(max_examples=20, deadline=None)
def test_without_stages_slots_are_those_of_the_width(
    k: int, data: st.DataObject, pages: int
) -> None:
    sizes = data.draw(geometries(Split(1, k)))
    slots = sizes.slots(Split(1, k))
    assert slots.count == sizes.slots_per_page(k)
    assert (slots.layers, slots.heads) == (sizes.num_layers, sizes.heads_per_rank(k))
    assert slots.first_blocks(pages) == tuple(range(slots.count))
    assert slots.num_blocks(pages) == pages * slots.count


@given(st.integers(1, 24), st.integers(1, 24), st.sampled_from(SPLITS))
@settings(deadline=None)
def test_shares_are_equal_or_refused(layers: int, heads: int, split: Split) -> None:
    fits_layers = layers % split.pp == 0
    fits_heads = heads % split.tp == 0 or split.tp % heads == 0
    sizes = geometry(layers, heads)
    if fits_layers and fits_heads:
        assert sizes.slots(split).layers * split.pp == layers
        return
    reason = "stages do not divide the" if not fits_layers else f"width {split.tp} "
    with pytest.raises(GeometryError, match=reason):
        sizes.slots(split)
