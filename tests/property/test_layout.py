"""Layouts under arbitrary use: the notation round-trips, losing and joining keep partitions."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from comm_pool.layout import (
    Group,
    Layout,
    LayoutError,
    Mode,
    Rank,
    diff,
    format_layout,
    parse_layout,
    supported_layouts,
)
from comm_pool.mixed import Mixed
from comm_pool.plan import communicator_plan

WIDTHS = (1, 2, 4, 8)
SHAPES = (Mixed(2, 2), Mixed(2, 4), Mixed(4, 2))
ALL = {world: supported_layouts(world, WIDTHS, tuple(Mode), SHAPES) for world in range(1, 9)}
some_ranks = st.frozensets(st.integers(0, 9).map(Rank))


@st.composite
def layouts_in_worlds(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout and its world; ranks may be missing."""
    world = draw(st.integers(1, 8))
    layout = draw(st.sampled_from(ALL[world]))
    groups = [draw(with_parts(group)) for group in layout.groups]
    return Layout(tuple(groups)).without(draw(some_ranks)), world


@st.composite
def with_parts(draw: st.DrawFn, group: Group) -> Group:
    """A pipeline group has stages of one rank or several; others stay."""
    if group.mode is not Mode.PP:
        return group
    parts = [parts for parts in WIDTHS if parts < group.width]
    return Group(group.ranks, Mode.PP, draw(st.sampled_from(parts)))


@given(layouts_in_worlds())
def test_notation_round_trips(given_layout: tuple[Layout, int]) -> None:
    layout, world = given_layout
    text = format_layout(layout, world)
    assert parse_layout(text, world, WIDTHS) == layout
    words = [token.rstrip("0123456789") for token in text.split("+")]
    assert ("dp", "dp") not in pairwise(words)
    assert ("off", "off") not in pairwise(words)


@given(st.text(alphabet="dtspof+0123489 -", max_size=14), st.integers(1, 8))
def test_any_text_is_a_layout_of_the_world_or_refused(text: str, world: int) -> None:
    try:
        layout = parse_layout(text, world, WIDTHS)
    except LayoutError:
        return
    canonical = format_layout(layout, world)
    assert parse_layout(canonical, world, WIDTHS) == layout
    assert layout.ranks == tuple(range(world)) or "off" in text


tokens = st.tuples(
    st.sampled_from(["dp", "tp", "sp", "shift", "pp", "off"]), st.sampled_from([1, 2, 3, 4])
)


@given(st.lists(tokens, min_size=1, max_size=5))
def test_well_formed_tokens_are_taken_exactly_when_aligned(parts: list[tuple[str, int]]) -> None:
    text = "+".join(f"{word}{count}" for word, count in parts)
    world, fits = 0, True
    for word, count in parts:
        if word in ("tp", "sp", "shift", "pp"):
            fits = fits and count in (2, 4) and world % count == 0
        world += count
    try:
        layout = parse_layout(text, world, WIDTHS)
    except LayoutError:
        assert not fits
    else:
        assert fits
        assert len(layout.ranks) == sum(count for word, count in parts if word != "off")


@given(layouts_in_worlds(), some_ranks)
def test_losing_ranks_keeps_the_others_and_their_whole_groups(
    given_layout: tuple[Layout, int], lost: frozenset[Rank]
) -> None:
    layout, _ = given_layout
    left = layout.without(lost)
    assert set(left.ranks) == set(layout.ranks) - lost
    assert left.without(lost) == left
    for group in layout.groups:
        if lost.isdisjoint(group.ranks):
            assert group in left.groups
    affected = diff(layout, left)
    hit = [group for group in layout.groups if not lost.isdisjoint(group.ranks)]
    assert affected == {rank for group in hit for rank in group.ranks}


@given(layouts_in_worlds(), some_ranks)
def test_joining_ranks_affects_only_them(
    given_layout: tuple[Layout, int], joined: frozenset[Rank]
) -> None:
    layout, _ = given_layout
    grown = layout.plus(joined)
    assert set(grown.ranks) == set(layout.ranks) | joined
    assert diff(layout, grown) == joined - set(layout.ranks)
    assert all(grown.group_of(rank).mode is Mode.DP for rank in joined - set(layout.ranks))


@given(layouts_in_worlds(), layouts_in_worlds())
def test_diff_is_exactly_the_ranks_whose_group_differs(
    first: tuple[Layout, int], second: tuple[Layout, int]
) -> None:
    old, new = first[0], second[0]
    expected = {
        rank
        for rank in {*old.ranks, *new.ranks}
        if not (rank in old.ranks and rank in new.ranks) or old.group_of(rank) != new.group_of(rank)
    }
    assert diff(old, new) == diff(new, old) == expected


@given(st.sampled_from([1, 2, 4, 8]), some_ranks)
def test_every_layout_is_served_by_the_plan(world: int, lost: frozenset[Rank]) -> None:
    plan = communicator_plan(world, [width for width in WIDTHS if width <= world])
    for layout in ALL[world]:
        for group in layout.without(lost).groups:
            assert group.width == 1 or group.ranks in plan
