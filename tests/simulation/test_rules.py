"""Some seed finds each row of the participant's table that is taken away.

`python -m tests.simulation.rule_faults` tries all rows and facts with more seeds.
"""

import pytest

from tests.simulation.rule_faults import ROWS, Run, finds, first_run
from tests.simulation.seeds import CALM, WIDE

SEEDS = 12
FOUND_BY: dict[str, Run] = {
    "row 1, WAIT": Run(1),
    "row 2, WAIT": Run(0),
    "row 3, WAIT": Run(2, 0.3),
    "row 4, WAIT": Run(0),
    "row 5, WAIT": Run(1, kind=WIDE),
    "row 6, JOIN": Run(1, 0.1),
    "row 7, LEAVE": Run(0, kind=WIDE),
    "row 8, LEAVE": Run(0, kind=CALM),
    "row 10, LEAVE": Run(7),
    "row 11, LEAVE": Run(62, 0.1),
    "row 12, WAIT": Run(28, kind=CALM),
    "row 13, LEAVE_RECOMPUTE": Run(21),
    "row 14, WAIT": Run(0, kind=CALM),
    "row 15, LEAVE": Run(0),
    "row 16, ACK": Run(0, kind=CALM),
    "row 17, ACK": Run(1),
    "row 18, SERVE": Run(0),
    "row 19, RESOLVE_JOINED": Run(0),
    "row 20, RESOLVE_PARKED": Run(0),
    "row 21, RESOLVE": Run(1, kind=WIDE),
    "row 22, RESOLVE": Run(4, 0.3),
    "row 23, JOIN_PROMISED": Run(4, 0.3),
    "row 24, PARK": Run(4, kind=WIDE),
    "row 25, ACK": Run(4, kind=WIDE),
    "row 26, PARK": Run(0),
    "row 27, RESHARD": Run(0),
    "row 28, ACK": Run(4, 0.3),
    "row 29, JOIN": Run(5),
    "row 30, JOIN": Run(0),
}
"""The first run that finds each; it is tried first, as long as it does."""
WITHOUT_A_RUN = {"row 9, WAIT"}
"""Without it no run fails, but none copies early: `test_calm` counts that."""


@pytest.mark.parametrize("row", FOUND_BY)
def test_a_row_that_is_missing_is_found(row: str) -> None:
    assert finds(row, FOUND_BY[row]) or first_run(row, range(SEEDS)), f"no seed finds: {row}"


def test_the_rows_are_those_of_the_table() -> None:
    assert FOUND_BY.keys() | WITHOUT_A_RUN == ROWS.keys()
