"""Page geometry: constant bytes, capacity that follows the width, slots that tile pages."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvadaptor.geometry import GeometryError, PageGeometry, Slots, Split

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
    ("k", "slots", "heads", "tokens"),
    [(1, 1, 8, 16), (2, 2, 4, 32), (8, 8, 1, 128), (16, 8, 1, 128)],
)
def test_what_a_page_becomes_at_width_k(k: int, slots: int, heads: int, tokens: int) -> None:
    assert LLAMA_8B.slots_per_page(k) == slots
    assert LLAMA_8B.heads_per_rank(k) == heads
    assert LLAMA_8B.page_tokens(k) == tokens


def test_one_head_gives_one_slot_at_any_width() -> None:
    single = replace(SMALL, num_kv_heads=1)
    assert [single.slots_per_page(k) for k in WIDTHS] == [1] * 5
    assert single.page_tokens(16) == single.page_tokens(1)


@pytest.mark.parametrize(
    ("tokens", "k", "pages"),
    [(0, 1, 0), (1, 1, 1), (16, 1, 1), (17, 1, 2), (17, 2, 1), (33, 2, 2), (129, 16, 2)],
)
def test_pages_for_tokens_rounds_up(tokens: int, k: int, pages: int) -> None:
    assert LLAMA_8B.pages_for_tokens(tokens, k) == pages


@pytest.mark.parametrize("k", WIDTHS)
def test_pages_hold_the_tokens_of_all_their_slots_and_no_more(k: int) -> None:
    tokens = 7 * LLAMA_8B.page_tokens(k)
    assert LLAMA_8B.pages_for_tokens(tokens, k) == 7
    assert LLAMA_8B.pages_for_tokens(tokens + 1, k) == 8


@pytest.mark.parametrize(
    ("heads", "k", "reason"),
    [
        (6, 4, "width 4 does not divide the 6 KV heads"),
        (3, 2, "width 2 does not divide the 3 KV heads"),
        (3, 4, "width 4 is not a multiple of the 3 KV heads"),
        (6, 8, "width 8 is not a multiple of the 6 KV heads"),
        (8, 0, "at least one rank"),
        (8, -2, "at least one rank"),
    ],
)
def test_widths_that_do_not_fit_the_heads_are_refused(heads: int, k: int, reason: str) -> None:
    geometry = replace(SMALL, num_kv_heads=heads)
    asked: list[Callable[[int], object]] = [
        geometry.slots_per_page,
        geometry.heads_per_rank,
        geometry.page_tokens,
        lambda width: geometry.pages_for_tokens(1, width),
    ]
    for ask in asked:
        with pytest.raises(GeometryError, match=reason):
            ask(k)


def test_blocks_of_a_stage_follow_its_regions() -> None:
    """32 layers in memory of 100 pages: the second stage's blocks begin 16 regions later."""
    slots = LLAMA_8B.slots(Split(2, 2))
    assert slots == Slots(rows=2, columns=2, layers=16, heads=4)
    assert slots.first_blocks(100) == (0, 1, 3200, 3201)
    assert slots.num_blocks(100) == 3400


@pytest.mark.parametrize(
    ("layers", "split", "reason"),
    [
        (30, Split(4, 1), "4 stages do not divide the 30 layers, so ranks would hold unequal"),
        (3, Split(2, 2), "2 stages do not divide the 3 layers"),
        (2, Split(4, 1), "4 stages do not divide the 2 layers"),
        (4, Split(2, 8), "width 8 is not a multiple of the 6 KV heads"),
    ],
)
def test_stages_that_do_not_divide_the_layers_are_refused(
    layers: int, split: Split, reason: str
) -> None:
    with pytest.raises(GeometryError, match=reason):
        replace(SMALL, num_layers=layers, num_kv_heads=6).slots(split)


@pytest.mark.parametrize(
    ("pp", "tp", "reason"), [(3, 1, "pp 3"), (1, 6, "tp 6"), (0, 1, "pp 0"), (1, -2, "tp -2")]
)
def test_splits_are_powers_of_two(pp: int, tp: int, reason: str) -> None:
    with pytest.raises(GeometryError, match=f"{reason} of a split is not a power of two"):
        Split(pp, tp)


@pytest.mark.parametrize(
    "name",
    ["num_layers", "num_kv_heads", "head_dim_k", "head_dim_v", "dtype_bytes", "tokens_per_slot"],
)
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(GeometryError, match=f"{name} must be at least 1, not 0"):
        replace(SMALL, **{name: 0})


def test_negative_amounts_are_refused() -> None:
    asked: list[Callable[[], object]] = [
        lambda: SMALL.pages_for_tokens(-1, 1),
        lambda: SMALL.num_pages(-1),
    ]
    for ask in asked:
        with pytest.raises(GeometryError, match="must not be negative"):
            ask()
