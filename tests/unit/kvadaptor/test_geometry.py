"""Page geometry: constant bytes, capacity that follows the width, slots that tile pages."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvadaptor.geometry import GeometryError, PageGeometry

LLAMA_8B = PageGeometry(
    num_layers=32,
    num_kv_heads=8,
    head_dim_k=128,
    head_dim_v=128,
    dtype_bytes=2,
    tokens_per_slot=16,
)
SMALL = PageGeometry(
    num_layers=3,
    num_kv_heads=4,
    head_dim_k=3,
    head_dim_v=2,
    dtype_bytes=2,
    tokens_per_slot=5,
)
WIDTHS = (1, 2, 4, 8, 16)


def test_bytes_of_a_known_model() -> None:
    assert LLAMA_8B.layer_page_bytes == 64 * 1024
    assert LLAMA_8B.page_bytes == 2 * 1024**2
    assert LLAMA_8B.num_pages(2**30) == 512
    assert LLAMA_8B.num_pages(2**21 - 1) == 0


def test_k_and_v_may_differ_in_size() -> None:
    assert SMALL.layer_page_bytes == 4 * 5 * (3 + 2) * 2


@pytest.mark.parametrize(
    ("k", "slots", "heads", "copies", "tokens"),
    [(1, 1, 8, 1, 16), (2, 2, 4, 1, 32), (8, 8, 1, 1, 128), (16, 8, 1, 2, 128)],
)
def test_what_a_page_becomes_at_width_k(
    k: int, slots: int, heads: int, copies: int, tokens: int
) -> None:
    assert LLAMA_8B.slots_per_page(k) == slots
    assert LLAMA_8B.heads_per_rank(k) == heads
    assert LLAMA_8B.replication(k) == copies
    assert LLAMA_8B.page_tokens(k) == tokens


@pytest.mark.parametrize("k", WIDTHS)
def test_slots_tile_the_whole_buffer_without_gap_or_overlap(k: int) -> None:
    num_pages, end = 3, 0
    for layer in range(SMALL.num_layers):
        for page in range(num_pages):
            for slot in range(SMALL.slots_per_page(k)):
                span = SMALL.slot_byte_range(layer, page, slot, k, num_pages)
                assert span.start == end
                assert len(span) == SMALL.slot_bytes(k)
                end = span.stop
    assert end == num_pages * SMALL.page_bytes


@pytest.mark.parametrize("k", WIDTHS)
def test_a_slot_of_a_dp_page_is_where_its_heads_lie(k: int) -> None:
    head_bytes = SMALL.layer_page_bytes // SMALL.num_kv_heads
    for rank in range(k):
        heads = SMALL.head_range(rank, k)
        slot = heads.start // SMALL.heads_per_rank(k)
        span = SMALL.slot_byte_range(0, 2, slot, k, 4)
        page = SMALL.slot_byte_range(0, 2, 0, 1, 4)
        assert span.start == page.start + heads.start * head_bytes
        assert span.stop == page.start + heads.stop * head_bytes


@pytest.mark.parametrize("k", WIDTHS)
def test_every_head_is_held_equally_often_and_in_order(k: int) -> None:
    held = [head for rank in range(k) for head in SMALL.head_range(rank, k)]
    assert held == sorted(held)
    assert {held.count(head) for head in range(4)} == {SMALL.replication(k)}


def test_neighbours_share_a_replicated_head() -> None:
    pairs = replace(SMALL, num_kv_heads=2)
    assert [list(pairs.head_range(rank, 4)) for rank in range(4)] == [[0], [0], [1], [1]]


def test_one_head_gives_one_slot_at_any_width() -> None:
    single = replace(SMALL, num_kv_heads=1)
    assert [single.slots_per_page(k) for k in WIDTHS] == [1] * 5
    assert single.page_tokens(16) == single.page_tokens(1)


def test_slot_index_counts_through_the_pages() -> None:
    assert [SMALL.slot_index(page, slot, 2) for page in (0, 3) for slot in (0, 1)] == [0, 1, 6, 7]
    assert SMALL.slot_index(3, 0, 1) == 3


@pytest.mark.parametrize(
    ("tokens", "k", "pages"),
    [(0, 1, 0), (1, 1, 1), (16, 1, 1), (17, 1, 2), (17, 2, 1), (33, 2, 2), (129, 16, 2)],
)
def test_pages_for_tokens_rounds_up(tokens: int, k: int, pages: int) -> None:
    assert LLAMA_8B.pages_for_tokens(tokens, k) == pages


@pytest.mark.parametrize("k", WIDTHS)
def test_capacity_is_the_most_tokens_that_pages_hold(k: int) -> None:
    tokens = LLAMA_8B.capacity_tokens(7, k)
    assert LLAMA_8B.pages_for_tokens(tokens, k) == 7
    assert LLAMA_8B.pages_for_tokens(tokens + 1, k) == 8
    assert LLAMA_8B.capacity_tokens(0, k) == 0


@pytest.mark.parametrize(
    ("heads", "k", "reason"),
    [
        (6, 4, "width 4 does not divide the 6 KV heads"),
        (3, 2, "width 2 does not divide the 3 KV heads"),
        (3, 4, "width 4 is no multiple of the 3 KV heads"),
        (6, 8, "width 8 is no multiple of the 6 KV heads"),
        (8, 0, "at least one rank"),
        (8, -2, "at least one rank"),
    ],
)
def test_widths_that_do_not_fit_the_heads_are_refused(heads: int, k: int, reason: str) -> None:
    geometry = replace(SMALL, num_kv_heads=heads)
    asked: list[Callable[[int], object]] = [
        geometry.slots_per_page,
        geometry.heads_per_rank,
        geometry.replication,
        geometry.slot_bytes,
        geometry.page_tokens,
        lambda width: geometry.head_range(0, width),
        lambda width: geometry.pages_for_tokens(1, width),
        lambda width: geometry.capacity_tokens(1, width),
    ]
    for ask in asked:
        with pytest.raises(GeometryError, match=reason):
            ask(k)


@pytest.mark.parametrize(
    "name",
    ["num_layers", "num_kv_heads", "head_dim_k", "head_dim_v", "dtype_bytes", "tokens_per_slot"],
)
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(GeometryError, match=f"{name} must be at least 1, not 0"):
        replace(SMALL, **{name: 0})


def test_indices_out_of_range_are_refused() -> None:
    for rank in (-1, 2):
        with pytest.raises(GeometryError, match=f"rank_in_group {rank} is not in 0..1"):
            SMALL.head_range(rank, 2)
    for layer, page, slot, name in ((3, 0, 0, "layer"), (0, 4, 0, "page"), (0, 0, 2, "slot")):
        with pytest.raises(GeometryError, match=f"{name} . is not in"):
            SMALL.slot_byte_range(layer, page, slot, 2, 4)
    for negative in ((-1, 0, 0), (0, -1, 0), (0, 0, -1)):
        with pytest.raises(GeometryError, match="-1 is not in"):
            SMALL.slot_byte_range(*negative, 2, 4)
    with pytest.raises(GeometryError, match="page must not be negative"):
        SMALL.slot_index(-1, 0, 2)


def test_negative_amounts_are_refused() -> None:
    asked: list[Callable[[], object]] = [
        lambda: SMALL.pages_for_tokens(-1, 1),
        lambda: SMALL.num_pages(-1),
        lambda: SMALL.capacity_tokens(-1, 1),
    ]
    for ask in asked:
        with pytest.raises(GeometryError, match="must not be negative"):
            ask()
