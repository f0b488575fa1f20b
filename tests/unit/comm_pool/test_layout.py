"""Layouts: what a group may be, the notation, and what changes between two layouts."""

import pytest

from comm_pool.layout import (
    MAX_ENUMERATED_WORLD,
    MAX_NOTATION_CHARS,
    AbsentRankError,
    Group,
    Layout,
    LayoutError,
    Mode,
    Rank,
    diff,
    format_layout,
    group_of,
    parse_layout,
    step_name,
    supported_layouts,
)
from comm_pool.mixed import Mixed, Staged

WIDTHS = (1, 2, 4)
MODES = tuple(Mode)


def ranks(*numbers: int) -> tuple[Rank, ...]:
    return tuple(Rank(number) for number in numbers)


def read(text: str, world: int = 4) -> Layout:
    return parse_layout(text, world, WIDTHS)


def shape(layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    return [(group.mode.value, group.ranks) for group in layout.groups]


def test_a_mixed_group_is_one_of_sp_or_shift_with_parts() -> None:
    group = Group(ranks(4, 5, 6, 7), Mode.SHIFT, 2)
    assert (group.width, group.name, group.mixed) == (4, "shift2tp2", Mixed(2, 2))
    assert Group(ranks(0, 1), Mode.SP).mixed is None
    assert read("sp2tp2", 4).groups == (Group(ranks(0, 1, 2, 3), Mode.SP, 2),)
    assert read("sp2tp2") != read("sp4")


@pytest.mark.parametrize(
    ("members", "mode", "parts", "reason"),
    [
        ((0, 1, 2, 3), Mode.TP, 2, "mode tp never has parts"),
        ((0,), Mode.DP, 2, "mode dp never has parts"),
        ((0, 1, 2, 3), Mode.SP, 4, "use 'tp4'"),
        ((0, 1, 2, 3), Mode.SP, 3, "tp3 in 'sp1tp3' is not a power of two"),
        ((0, 1, 2, 3), Mode.SHIFT, 0, "is not a power of two"),
        ((0, 1), Mode.SP, 4, "is not a power of two"),
        ((0, 1, 2, 3), Mode.PP, 4, "'pp1tp4' has a single stage; use 'tp4'"),
        ((0, 1, 2, 3), Mode.PP, 3, "tp3 in 'pp1tp3' is not a power of two"),
        ((0, 1, 2, 3), Mode.PP, 0, "is not a power of two"),
    ],
)
def test_a_group_with_parts_refuses(
    members: tuple[int, ...], mode: Mode, parts: int, reason: str
) -> None:
    with pytest.raises(LayoutError, match=reason):
        Group(ranks(*members), mode, parts)


def test_a_pipeline_group_has_stages() -> None:
    group = Group(ranks(4, 5, 6, 7), Mode.PP, 2)
    assert (group.width, group.leader, group.name) == (4, 4, "pp2tp2")
    assert (group.stages, group.mixed) == (2, None)
    assert Group(ranks(0, 1), Mode.PP).stages == 2
    assert Group(ranks(0, 1, 2, 3), Mode.SP, 2).stages == 1
    assert read("pp2tp2").groups == (Group(ranks(0, 1, 2, 3), Mode.PP, 2),)
    assert len({read(text) for text in ("pp2tp2", "pp4", "tp4", "sp2tp2")}) == 4


def test_steps_of_a_pipeline_group_are_named_by_its_stages() -> None:
    groups = [Group(ranks(0, 1, 2, 3), Mode.PP, parts) for parts in (1, 2)]
    assert [each.step_modes for each in groups] == [(Staged(4),), (Staged(2, 2),)]
    names = [step_name(mode, 4) for each in groups for mode in each.step_modes]
    assert names == ["pp4", "pp2tp2"]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("dp1+off1+tp2", [(0,), (2, 3)]),
        ("pp4", [(3, 2, 1, 0)]),
        ("pp2tp2", [(2, 3, 0, 1)]),
        ("tp2+pp2", [(0, 1), (3, 2)]),
        ("shift2tp2", [(0, 1, 2, 3)]),
    ],
)
def test_lease_keys_tell_how_members_divide_kv(text: str, keys: list[tuple[int, ...]]) -> None:
    groups = read(text).groups
    assert [each.lease_key for each in groups] == keys
    for each in groups:
        if each.width > 1:
            again = group_of(each.lease_key)
            assert (again.ranks, again.stages) == (each.ranks, each.stages)
            assert again.lease_key == each.lease_key


def test_group_has_width_leader_and_name() -> None:
    group = Group(ranks(4, 5, 6, 7), Mode.SP)
    assert (group.width, group.leader, group.name) == (4, 4, "sp4")
    assert Group(ranks(3), Mode.DP).name == "dp1"


@pytest.mark.parametrize(
    ("members", "mode", "reason"),
    [
        ((), Mode.DP, "at least one rank"),
        ((0, 2), Mode.TP, "contiguous"),
        ((1, 0), Mode.TP, "contiguous"),
        ((0, 0), Mode.TP, "contiguous"),
        ((-1,), Mode.DP, "from 0 up"),
        ((0, 1, 2), Mode.TP, "power of two"),
        ((1, 2), Mode.TP, "aligned"),
        ((2, 3, 4, 5), Mode.SP, "aligned"),
        ((0, 1), Mode.DP, "does not go with width 2"),
        ((0,), Mode.TP, "does not go with width 1"),
        ((0,), Mode.SP, "does not go with width 1"),
        ((0,), Mode.PP, "does not go with width 1"),
    ],
)
def test_group_refuses(members: tuple[int, ...], mode: Mode, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        Group(ranks(*members), mode)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp4", [("dp", (0,)), ("dp", (1,)), ("dp", (2,)), ("dp", (3,))]),
        ("tp4", [("tp", (0, 1, 2, 3))]),
        ("sp4", [("sp", (0, 1, 2, 3))]),
        ("shift4", [("shift", (0, 1, 2, 3))]),
        ("sp2tp2", [("sp", (0, 1, 2, 3))]),
        ("shift2tp2", [("shift", (0, 1, 2, 3))]),
        ("pp4", [("pp", (0, 1, 2, 3))]),
        ("pp2tp2", [("pp", (0, 1, 2, 3))]),
        ("pp2+pp2", [("pp", (0, 1)), ("pp", (2, 3))]),
        ("dp1+off1+pp2", [("dp", (0,)), ("pp", (2, 3))]),
        ("tp2+dp2", [("tp", (0, 1)), ("dp", (2,)), ("dp", (3,))]),
        ("dp2+tp2", [("dp", (0,)), ("dp", (1,)), ("tp", (2, 3))]),
        ("tp2+tp2", [("tp", (0, 1)), ("tp", (2, 3))]),
        ("tp2+sp2", [("tp", (0, 1)), ("sp", (2, 3))]),
        ("dp2+off1+dp1", [("dp", (0,)), ("dp", (1,)), ("dp", (3,))]),
        ("off2+tp2", [("tp", (2, 3))]),
        ("off4", []),
    ],
)
def test_notation_reads_and_writes(text: str, expected: list[tuple[str, tuple[int, ...]]]) -> None:
    layout = read(text)
    assert shape(layout) == expected
    assert format_layout(layout, 4) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("dp1+dp1+dp2", "dp4"),
        ("tp2+dp1+dp1", "tp2+dp2"),
        ("off1+off1+dp2", "off2+dp2"),
        ("dp1+off2+dp1", "dp1+off2+dp1"),
    ],
)
def test_notation_becomes_canonical(text: str, canonical: str) -> None:
    assert str(read(text)) == canonical


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty; write for example 'dp4'"),
        ("ep4", "'ep' in layout 'ep4' is not a mode; supported are dp, tp, sp, shift, pp, and off"),
        ("dp0+tp4", "'dp0' in layout 'dp0.tp4' has no ranks"),
        ("tp0", "has no ranks"),
        ("dp04", "not a word with a number"),
        ("TP4", "not a word with a number; did you mean 'tp4'."),
        ("TP2 + dp2", "not a word with a number; did you mean 'tp2.dp2'."),
        ("tp-4", "not a word with a number; did you mean 'tp4'."),
        ("tp4 ", "not a word with a number; did you mean 'tp4'."),
        ("tp", "number; write one such as dp4, tp2.tp2, tp4, sp4 or shift4."),
        ("TP", "number; write one such as dp4, tp2.tp2, tp4, sp4 or shift4."),
        ("tp4\n", "not a word with a number"),
        ("dp٤", "not a word with a number"),
        ("tp2++dp2", "'' in layout"),
        ("tp2+", "'' in layout"),
        ("tp1+dp3", "use 'dp1'"),
        ("sp1+dp3", "use 'dp1'"),
        ("shift1+dp3", "use 'dp1'"),
        (
            "tp8",
            "width 8 of 'tp8' is not supported; supported widths are 1, 2, 4: .* other --ranks",
        ),
        ("tp3+dp1", "width 3 of 'tp3' is not supported"),
        ("sp1tp4", "shares out no tokens; use 'tp4'"),
        ("sp4tp1", "splits no weights; use 'sp4'"),
        ("pp1", "'pp1' is a single rank, which has no peers; use 'dp1'"),
        ("pp8", "width 8 of 'pp8' is not supported"),
        ("pp1tp4", "'pp1tp4' has a single stage; use 'tp4'"),
        ("pp3tp2", "pp3 in 'pp3tp2' is not a power of two"),
        ("pp2tp3", "tp3 in 'pp2tp3' is not a power of two"),
        ("pp2tp4", "width 8 of 'pp2tp4' is not supported"),
        ("pp2sp2", "not a word with a number"),
        ("dp1+pp2+dp1", "'pp2' would start at rank 1, but .* multiple of 2"),
        ("shift3tp2", "sp3 in 'sp3tp2' is not a power of two"),
        ("sp2tp4", "width 8 of 'sp2tp4' is not supported"),
        ("tp2tp2", "not a word with a number"),
        ("sp2tp2+dp1", "covers more than 4 ranks"),
        ("dp1+sp2tp2", "'sp2tp2' would start at rank 1, but .* multiple of 4"),
        ("dp1+tp2+dp1", "'tp2' would start at rank 1, but .* multiple of 2"),
        ("off2+tp4", "'tp4' would start at rank 2"),
        ("dp2", "covers only 2 of 4 ranks, but must cover exactly 4 .dpN counts N ranks"),
        ("dp5", "covers more than 4 ranks"),
        ("tp4+dp1", "covers more than 4 ranks"),
        ("dp" + "9" * 900, "covers more than 4 ranks"),
        ("dp1+" * MAX_NOTATION_CHARS, f"at most {MAX_NOTATION_CHARS} are read"),
    ],
)
def test_notation_refuses_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason) as caught:
        read(text)
    assert str(caught.value).endswith((".", "?"))


def test_a_mixed_group_needs_the_width_in_which_it_exchanges() -> None:
    with pytest.raises(LayoutError, match="exchanges heads in groups of 2 ranks, which is no"):
        parse_layout("sp2tp2", 4, (1, 4))


def test_a_stage_of_several_ranks_needs_their_width() -> None:
    with pytest.raises(LayoutError, match="'pp4tp2' sums in groups of 2 ranks, which is not a"):
        parse_layout("pp4tp2", 8, (1, 4, 8))
    assert str(parse_layout("pp4tp2", 8, (1, 2, 8))) == "pp4tp2"


def test_a_stage_of_one_rank_needs_no_parts_in_the_notation() -> None:
    assert str(read("pp4tp1")) == "pp4"


def test_notation_refuses_a_width_that_is_no_power_of_two_even_if_supported() -> None:
    with pytest.raises(LayoutError, match="power of two"):
        parse_layout("tp3", 3, {3})


def test_notation_refuses_a_cell_without_ranks() -> None:
    with pytest.raises(LayoutError, match="at least one rank"):
        read("dp1", world=0)


def test_width_one_needs_no_mention() -> None:
    assert parse_layout("dp2", 2, ()).ranks == (0, 1)


def test_str_leaves_out_what_only_the_world_tells() -> None:
    layout = read("tp2+off2")
    assert str(layout) == "tp2"
    assert format_layout(layout, 4) == "tp2+off2"
    assert str(Layout(())) == ""
    with pytest.raises(LayoutError, match="does not fit into 1 ranks"):
        format_layout(layout, 1)


def test_layout_is_sorted_and_compares_by_content() -> None:
    low, high = Group(ranks(0, 1), Mode.TP), Group(ranks(2), Mode.DP)
    assert Layout((high, low)) == Layout((low, high)) == read("tp2+dp1", world=3)
    assert len({Layout((high, low)), Layout((low, high))}) == 1
    assert read("tp4") != read("sp4")


@pytest.mark.parametrize("other", [(1,), (0, 1), (0, 1, 2, 3)])
def test_layout_refuses_overlap(other: tuple[int, ...]) -> None:
    overlapping = Group(ranks(*other), Mode.TP if len(other) > 1 else Mode.DP)
    with pytest.raises(LayoutError, match="overlap"):
        Layout((Group(ranks(0, 1), Mode.TP), overlapping))


def test_group_of_finds_the_group_or_says_what_is_missing() -> None:
    layout = read("tp2+off1+dp1")
    assert layout.group_of(Rank(1)).name == "tp2"
    assert layout.group_of(Rank(3)).ranks == (3,)
    with pytest.raises(KeyError) as caught:
        layout.group_of(Rank(2))
    assert isinstance(caught.value, AbsentRankError)
    assert str(caught.value) == "rank 2 is in no group of layout 'tp2+off1+dp1'."


def test_ranks_and_widths() -> None:
    layout = read("dp1+off1+tp2")
    assert layout.ranks == (0, 2, 3)
    assert layout.widths == {1, 2}


def test_without_dissolves_only_the_groups_that_lose_a_rank() -> None:
    assert str(read("tp2+tp2").without(ranks(3))) == "tp2+dp1"
    assert str(read("tp4").without(ranks(1))) == "dp1+off1+dp2"
    assert read("tp2+tp2").without(ranks(2, 3)) == read("tp2+off2")
    assert read("dp4").without(ranks(0, 1, 2, 3)) == Layout(())
    assert read("tp4").without(ranks(9)) == read("tp4")


def test_plus_adds_missing_ranks_alone_and_leaves_the_others() -> None:
    lost = read("tp2+tp2").without(ranks(3))
    assert str(lost.plus(ranks(3))) == "tp2+dp2"
    assert lost.plus(ranks(0, 2)) == lost


@pytest.mark.parametrize(
    ("old", "new", "affected"),
    [
        ("dp4", "dp4", set()),
        ("dp4", "tp2+dp2", {0, 1}),
        ("tp2+dp2", "tp2+tp2", {2, 3}),
        ("tp4", "sp4", {0, 1, 2, 3}),
        ("sp4", "sp2tp2", {0, 1, 2, 3}),
        ("sp2tp2", "shift2tp2", {0, 1, 2, 3}),
        ("shift4", "sp4", {0, 1, 2, 3}),
        ("tp2+tp2", "tp4", {0, 1, 2, 3}),
        ("dp4", "dp3+off1", {3}),
        ("off1+dp3", "dp2+off2", {0, 2, 3}),
    ],
)
def test_diff_names_the_affected_ranks(old: str, new: str, affected: set[int]) -> None:
    assert diff(read(old), read(new)) == affected
    assert diff(read(new), read(old)) == affected


def test_supported_layouts_in_order() -> None:
    found = [str(each) for each in supported_layouts(4, (4, 2), (Mode.TP, Mode.DP))]
    assert found == ["dp4", "dp2+tp2", "tp2+dp2", "tp2+tp2", "tp4"]


def test_supported_layouts_do_not_follow_the_order_of_the_arguments() -> None:
    found = supported_layouts(2, (2, 1), (Mode.SP, Mode.TP, Mode.DP))
    assert [str(each) for each in found] == ["dp2", "tp2", "sp2"]


@pytest.mark.parametrize(("world", "count"), [(1, 1), (2, 5), (4, 29), (6, 145), (8, 845)])
def test_supported_layouts_are_all_and_each_once(world: int, count: int) -> None:
    found = supported_layouts(world, (1, 2, 4, 8), MODES)
    assert len(found) == len(set(found)) == count
    assert {each.ranks for each in found} == {tuple(range(world))}


def test_supported_layouts_with_mixed_groups() -> None:
    found = supported_layouts(4, (4,), (Mode.SP, Mode.SHIFT), [Mixed(2, 2), Mixed(2, 4)])
    assert [str(each) for each in found] == ["sp4", "sp2tp2", "shift4", "shift2tp2"]
    assert supported_layouts(4, (4,), (Mode.TP,), [Mixed(2, 2)]) == (read("tp4"),)


def test_supported_layouts_keep_to_the_modes() -> None:
    assert [str(each) for each in supported_layouts(2, (2,), [Mode.SP])] == ["sp2"]
    assert supported_layouts(3, (2,), [Mode.TP]) == ()


def test_supported_layouts_refuses_what_is_too_much_or_no_width() -> None:
    with pytest.raises(LayoutError, match="enumerated for 1 to 16"):
        supported_layouts(MAX_ENUMERATED_WORLD + 1, (2,), MODES)
    with pytest.raises(LayoutError, match="not 0"):
        supported_layouts(0, (2,), MODES)
    with pytest.raises(LayoutError, match="width 3 is not a power of two"):
        supported_layouts(6, (3,), MODES)
