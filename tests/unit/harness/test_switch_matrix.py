"""Walks through layouts: every pair comes, in one go, and the seed decides all of it."""

import re
from itertools import pairwise

import pytest

from comm_pool.layout import parse_layout
from tests.harness.cells.switch_matrix import (
    LAYOUTS,
    SEED_ENV,
    START,
    Kind,
    Moment,
    Plan,
    Row,
    day_seed,
    describe,
    draw_walk,
    may_follow,
    wanted_pairs,
)

SEEDS = (*range(10), *range(20261126, 20261131))
ROWS_MAX = 100
"""All 90 pairs of layouts need as many rows; few more may come on top."""


@pytest.fixture(scope="module", params=SEEDS)
def walk(request: pytest.FixtureRequest) -> list[Row]:
    return draw_walk(request.param)


def test_every_pair_comes(walk: list[Row]) -> None:
    met = {pair for row in walk for pair in row.pairs()}
    assert met == wanted_pairs(), "each wanted pair, and no impossible one"
    print(f"{len(met)} pairs in {len(walk)} rows")
    assert len(LAYOUTS) * (len(LAYOUTS) - 1) <= len(walk) <= ROWS_MAX


def test_pairs_are_counted_in_another_way() -> None:
    """Products of the dimensions, less what cannot be: a layout to itself, and idle requests."""
    layouts, plans, moments, kinds = len(LAYOUTS), len(Plan), len(Moment), len(Kind)
    impossible_pairs = (kinds - 1) + (moments - 1)
    assert len(wanted_pairs()) == (
        layouts * (layouts - 1)
        + 2 * layouts * (plans + moments + kinds)
        + plans * moments
        + plans * kinds
        + moments * kinds
        - impossible_pairs
    )


def test_each_row_begins_where_the_last_one_ended(walk: list[Row]) -> None:
    assert walk[0].origin == START
    assert all(one.target == other.origin for one, other in pairwise(walk))
    assert all(row.origin != row.target for row in walk)
    assert all(may_follow(row, last) for last, row in zip([None, *walk], walk, strict=False))


def test_most_rows_move_what_runs(walk: list[Row]) -> None:
    """Plans that keep streams waiting come no more often than pairs need them."""
    counts = {plan: sum(row.plan is plan for row in walk) for plan in Plan}
    assert max(counts, key=counts.__getitem__) is Plan.RESHARD, counts


def test_the_seed_decides_the_walk() -> None:
    assert draw_walk(7) == draw_walk(7)
    assert draw_walk(7) != draw_walk(8)


def test_the_seed_is_the_day_s_unless_another_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SEED_ENV, raising=False)
    assert re.fullmatch(r"20\d{6}", str(day_seed()))
    monkeypatch.setenv(SEED_ENV, "17")
    assert day_seed() == 17


def test_the_description_says_how_to_run_it_again(walk: list[Row]) -> None:
    said = describe(walk, 17)
    assert f"{SEED_ENV}=17" in said
    assert all(f"  {layout:<11}" in said for layout in LAYOUTS)


def test_every_layout_is_one_of_four_ranks() -> None:
    layouts = [parse_layout(layout, 4, widths=(1, 2, 4)) for layout in LAYOUTS]
    assert all(layout.ranks == (0, 1, 2, 3) for layout in layouts)
