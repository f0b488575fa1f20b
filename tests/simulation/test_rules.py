"""Some seed finds each row of the participant's table that is taken away.

`python -m tests.simulation.rule_faults` tries all rows and facts with more seeds.
"""

import pytest

from tests.simulation.rule_faults import ROWS, Run, finds, first_run

SEEDS = 12
FOUND_BY: dict[str, Run] = {
    "row 1, WAIT": (1, None),
    "row 2, WAIT": (0, None),
    "row 3, WAIT": (2, 0.3),
    "row 4, WAIT": (0, None),
    "row 5, WAIT": (1, None),
    "row 6, JOIN": (1, 0.1),
    "row 7, LEAVE": (0, None),
    "row 10, LEAVE": (7, None),
    "row 15, WAIT": (0, None),
    "row 16, LEAVE": (0, None),
    "row 19, ACK": (0, 0.1),
    "row 20, ACK": (1, None),
    "row 21, SERVE": (0, None),
    "row 23, RESOLVE_JOINED": (0, None),
    "row 24, RESOLVE_PARKED": (0, None),
    "row 25, RESOLVE": (2, 0.1),
    "row 26, RESOLVE": (4, 0.3),
    "row 27, JOIN_PROMISED": (8, 0.1),
    "row 30, PARK": (0, None),
    "row 31, RESHARD": (0, None),
    "row 32, ACK": (4, 0.3),
    "row 33, JOIN": (5, None),
    "row 34, JOIN": (0, None),
}
"""The first run that finds each; it is tried first, as long as it does."""


@pytest.mark.parametrize("row", FOUND_BY)
def test_a_row_that_is_missing_is_found(row: str) -> None:
    assert finds(row, FOUND_BY[row]) or first_run(row, range(SEEDS)), f"no seed finds: {row}"


def test_the_rows_are_those_of_the_table() -> None:
    assert FOUND_BY.keys() <= ROWS.keys()
