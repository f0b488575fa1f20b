"""Mixed groups: every member ends with the heads of full tp, and nothing is computed twice."""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_pool.head_exchange import ExchangeError, HeadExchange
from comm_pool.layout import Rank
from comm_pool.mixed import Mixed, MixedError, read_mixed, reducing_groups
from comm_pool.plan import communicator_plan
from kvadaptor.geometry import PageGeometry
from tests.harness.kv.slots import head_range

SHAPES = [Mixed(sp, tp) for sp in (2, 4, 8) for tp in (2, 4, 8) if sp * tp <= 16]
HEADS_MAX = 48


def part_of(mixed: Mixed, member: int) -> int:
    """Which part of the weights a member computes with, 0..tp-1."""
    return member // mixed.sp


def exchanging_with(mixed: Mixed, member: int) -> range:
    """The members of the same part: they exchange tokens for heads. An aligned group."""
    first = part_of(mixed, member) * mixed.sp
    return range(first, first + mixed.sp)


def exchanges(mixed: Mixed) -> Iterator[HeadExchange]:
    """Of full tp as wide as the shape, for all heads that it shares out evenly."""
    for kv_heads in range(1, HEADS_MAX + 1):
        for heads in range(kv_heads, HEADS_MAX + 1, kv_heads):
            try:
                yield HeadExchange(heads, kv_heads, mixed.width)
            except ExchangeError:
                continue


@pytest.mark.parametrize("mixed", SHAPES, ids=str)
def test_heads_and_pages_are_those_of_full_tp_for_all_numbers_of_heads(mixed: Mixed) -> None:
    checked = 0
    for full in exchanges(mixed):
        inside = full.part(mixed.tp)
        pages = PageGeometry(1, full.kv_heads, 8, 8, 2, 16)
        assert inside.width == mixed.sp
        for member in range(mixed.width):
            part, share = part_of(mixed, member), mixed.share_of(member)
            first = part * full.heads // mixed.tp
            first_kv = part * full.kv_heads // mixed.tp
            assert [first + head for head in inside.heads_of(share)] == [*full.heads_of(member)]
            held = [first_kv + head for head in inside.kv_heads_of(share)]
            assert held == [*full.kv_heads_of(member)] == [*head_range(pages, member, mixed.width)]
        checked += 1
    assert checked >= HEADS_MAX // mixed.width


shapes = st.sampled_from(SHAPES)
ALL = [(mixed, full) for mixed in SHAPES for full in exchanges(mixed)]


@given(st.sampled_from(ALL), st.integers(1, 40))
@settings(deadline=None)
def test_members_together_compute_each_head_of_each_token_once(
    given_heads: tuple[Mixed, HeadExchange], tokens: int
) -> None:
    mixed, full = given_heads
    inside = full.part(mixed.tp)
    got: list[Counter[tuple[int, int]]] = [Counter() for _ in range(mixed.width)]
    for member in range(mixed.width):
        first = part_of(mixed, member) * full.heads // mixed.tp
        peers = exchanging_with(mixed, member)
        for chunk in inside.before(tokens):
            if chunk.source == mixed.share_of(member):
                got[peers[chunk.target]].update(
                    (token, first + head) for token in chunk.tokens for head in chunk.heads
                )
    padded = inside.share(tokens) * mixed.sp
    assert tokens <= padded < tokens + mixed.sp
    for member, found in enumerate(got):
        assert set(found.values()) == {1}
        assert found.keys() == {(t, h) for t in range(padded) for h in full.heads_of(member)}


@given(shapes)
@settings(deadline=None)
def test_what_is_reduced_has_the_same_tokens_and_every_part_once(mixed: Mixed) -> None:
    for member in range(mixed.width):
        peers, same_part = mixed.reducing_with(member), exchanging_with(mixed, member)
        assert {*peers} & {*same_part} == {member}
        assert [part_of(mixed, each) for each in peers] == [*range(mixed.tp)]
        assert {mixed.share_of(each) for each in peers} == {mixed.share_of(member)}
        assert [mixed.share_of(each) for each in same_part] == [*range(mixed.sp)]
        assert {part_of(mixed, each) for each in same_part} == {part_of(mixed, member)}


@given(st.sampled_from([16, 32]), st.lists(shapes, max_size=4))
@settings(deadline=None)
def test_strided_groups_hold_every_rank_once_and_the_others_are_planned(
    world: int, wanted: list[Mixed]
) -> None:
    groups = reducing_groups(world, wanted)
    assert [*groups] == sorted({*wanted})
    assert groups == reducing_groups(world, reversed(wanted))
    widths = {width for each in wanted for width in (each.width, each.sp)}
    planned = communicator_plan(world, widths)
    for mixed, lists in groups.items():
        assert sorted(rank for ranks in lists for rank in ranks) == [*range(world)]
        for ranks in lists:
            first = ranks[0] // mixed.width * mixed.width
            for rank in ranks:
                member = rank - first
                assert [first + each for each in mixed.reducing_with(member)] == ranks
                # vLLM takes a rank's place in its group for the number of its part.
                assert ranks.index(rank) == part_of(mixed, member)
                peers = tuple(Rank(first + each) for each in exchanging_with(mixed, member))
                assert peers in planned


def test_of_eight_ranks_each_reduces_with_the_one_across() -> None:
    mixed = read_mixed("sp2tp2")
    assert reducing_groups(8, [mixed]) == {mixed: [[0, 2], [1, 3], [4, 6], [5, 7]]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sp4", "not a mixed group, such as 'sp2tp2'"),
        ("tp2sp2", "not a mixed group"),
        ("shift2tp2", "not a mixed group"),
        ("sp2tp2 ", "not a mixed group"),
        ("sp02tp2", "not a mixed group"),
        ("sp1tp4", "shares out no tokens; use 'tp4'"),
        ("sp4tp1", "splits no weights; use 'sp4'"),
        ("sp3tp2", "sp3 in 'sp3tp2' is not a power of two"),
        ("sp2tp6", "tp6 in 'sp2tp6' is not a power of two"),
    ],
)
def test_what_is_not_mixed_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(MixedError, match=reason):
        read_mixed(text)


@given(shapes)
@settings(deadline=None)
def test_notation_round_trips(mixed: Mixed) -> None:
    assert read_mixed(str(mixed)) == mixed


def test_an_exchange_falls_into_equal_runs_only() -> None:
    with pytest.raises(ExchangeError, match="do not fall into 3 equal runs"):
        HeadExchange(8, 8, 4).part(3)
