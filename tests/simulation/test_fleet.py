"""A fleet in simulation: cells behind the gateways' placement, and a day of many of them."""

import pytest

from comm_pool.layout import parse_layout
from tests.simulation.fleet_cells import run_fleet
from tests.simulation.fleet_day import (
    KEPT_S,
    QUEUED_PER_CELL,
    START_S,
    Curve,
    Seen,
    by_queue,
    by_rate,
    load_of,
    rates_of_day,
    run_day,
)
from tests.simulation.policy_runs import GRACE_S, SETTINGS, WIDTHS, good
from tests.simulation.policy_shapes import LLAMA_70B_FP8, arrivals
from tools.simulator.cell import SimCell

SECONDS = 20.0
FLAT = Curve(met=(1.0,) * 15, most=10.0)
"""A cell that serves ten requests a second and no more."""


def cell() -> SimCell:
    return SimCell(parse_layout("tp2+tp2", 4, WIDTHS), LLAMA_70B_FP8, SETTINGS)


def test_cells_behind_the_placement_are_as_good_as_one_with_its_share() -> None:
    """What the model of a day takes for granted, at 70 % of what a cell can do."""
    rate, cells = 12.0, 4
    load = arrivals(load_of(rate * cells, SECONDS), 1)
    runs = run_fleet([cell() for _ in range(cells)], load, SECONDS + GRACE_S)
    assert sum(len(run.requests) for run in runs) == len(load)
    alone = arrivals(load_of(rate, SECONDS), 2)
    single = good(cell().run(alone, SECONDS + GRACE_S)) / len(alone)
    met = sum(map(good, runs)) / len(load)
    print(f"\nwithin goals: {met:.3f} of {cells} cells' requests, {single:.3f} of a single cell's")
    assert met == pytest.approx(single, abs=0.05)
    busiest = max(len(run.requests) for run in runs)
    assert busiest < 1.2 * len(load) / cells


def test_a_cell_tells_what_it_holds() -> None:
    mine = cell()
    assert mine.load.running == sum(mine.load.queued) == 0
    assert mine.load.blocks_free == mine.load.blocks_total > 0
    for each in arrivals(load_of(400.0, 1.0), 3):
        mine.offer(each)
    mine.advance(1.0)
    assert mine.load.running > 0
    assert mine.load.blocks_free < mine.load.blocks_total


def test_a_day_with_cells_enough_is_good_and_counts_them_all() -> None:
    day = run_day([25.0] * 3_600, FLAT, lambda _: 4, 1)
    assert day.cell_hours == pytest.approx(4)
    assert day.met == pytest.approx(1.0, abs=0.01)
    assert (day.waited, day.started) == (0.0, 0)


def test_a_new_cell_takes_its_time_to_start() -> None:
    """Twice as many requests as there is room for: they wait until the cells are there."""
    rates = [9.0] * 100 + [36.0] * 3_500
    day = run_day(rates, FLAT, by_rate(10.0, 0.95), 1)
    assert day.waited * sum(rates) > 36.0 * START_S / 2
    assert day.most_cells == 4
    assert day.met + day.waited == pytest.approx(1.0, abs=0.01)


def test_cells_are_kept_for_a_while() -> None:
    rates = [36.0] * 600 + [4.0] * 3_000
    day = run_day(rates, FLAT, by_rate(10.0, 0.95), 1)
    assert 4 * (600 + KEPT_S) / 3_600 < day.cell_hours < 4 * (600 + KEPT_S + 300) / 3_600 + 1


def test_scaling_by_queue_gives_up_cells_that_are_busy() -> None:
    """Where nobody waits it sees no need: that is why rates are the better measure."""
    busy = Seen(rate=90.0, queued=0.0, ready=10)
    assert by_queue(busy) == 1
    assert by_rate(10.0, 0.9)(busy) == 10
    assert by_queue(Seen(90.0, 2 * QUEUED_PER_CELL, 10)) == 12


def test_a_day_has_a_night_and_bursts() -> None:
    rates = rates_of_day(10, 10.0, 1)
    assert max(rates) > 1.4 * sorted(rates)[len(rates) * 3 // 4]
    assert min(rates) < 0.2 * max(rates)
    assert rates == rates_of_day(10, 10.0, 1)
