"""The communicator plan: which groups, in which order, and which widths are refused."""

import pytest

from comm_pool.layout import Mode, supported_layouts
from comm_pool.plan import PlanError, by_width, communicator_plan, normalise_widths


def test_plan_is_ordered_by_width_then_first_rank() -> None:
    assert communicator_plan(4, (4, 1, 2)) == ((0, 1), (2, 3), (0, 1, 2, 3))


def test_plan_does_not_depend_on_how_widths_are_given() -> None:
    assert communicator_plan(8, [8, 2, 4, 2]) == communicator_plan(8, frozenset({2, 4, 8}))


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16])
def test_plan_of_all_powers_of_two_has_one_group_less_than_ranks(world: int) -> None:
    widths = [width for width in (1, 2, 4, 8, 16) if width <= world]
    assert len(communicator_plan(world, widths)) == world - 1


def test_plan_skips_widths_that_are_not_supported() -> None:
    assert communicator_plan(4, (4,)) == ((0, 1, 2, 3),)
    assert communicator_plan(4, ()) == ()
    assert communicator_plan(6, (2,)) == ((0, 1), (2, 3), (4, 5))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_plan_holds_every_wide_group_of_every_layout_and_no_other(world: int) -> None:
    widths = [width for width in (1, 2, 4, 8) if width <= world]
    wanted = {
        group.ranks
        for layout in supported_layouts(world, widths, (Mode.DP, Mode.TP))
        for group in layout.groups
        if group.width > 1
    }
    assert set(communicator_plan(world, widths)) == wanted


def test_by_width_gives_what_one_collective_call_per_width_takes() -> None:
    grouped = by_width(communicator_plan(4, (2, 4)))
    assert list(grouped.items()) == [(2, [[0, 1], [2, 3]]), (4, [[0, 1, 2, 3]])]


def test_widths_are_sorted_unique_and_hold_one() -> None:
    assert normalise_widths(8, (4, 2, 4)) == (1, 2, 4)
    assert normalise_widths(3, ()) == (1,)


@pytest.mark.parametrize(
    ("world", "widths", "reason"),
    [
        (0, (1,), "at least one rank"),
        (4, (0,), "width 0 is not a power of two"),
        (4, (-2,), "width -2 is not a power of two"),
        (6, (3,), "width 3 is not a power of two"),
        (4, (2, 8), "width 8 is more than the 4 ranks"),
        (6, (2, 4), "width 4 does not divide the 6 ranks"),
    ],
)
def test_widths_are_refused_with_a_reason(world: int, widths: tuple[int, ...], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        normalise_widths(world, widths)
    with pytest.raises(PlanError, match=reason):
        communicator_plan(world, widths)
