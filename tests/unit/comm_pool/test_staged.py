"""Pipeline groups: their notation, and what is none."""

import pytest

from comm_pool.mixed import Staged, StagedError


def test_notation() -> None:
    assert [str(each) for each in (Staged(4), Staged(2, 2), Staged(4, 2))] == [
        "pp4",
        "pp2tp2",
        "pp4tp2",
    ]


@pytest.mark.parametrize(
    ("pp", "tp", "reason"),
    [
        (1, 4, "'pp1tp4' has a single stage; use 'tp4'"),
        (3, 1, "pp3 in 'pp3' is not a power of two"),
        (2, 6, "tp6 in 'pp2tp6' is not a power of two"),
        (0, 2, "pp0 in 'pp0tp2' is not a power of two"),
        (2, 0, "tp0 in 'pp2tp0' is not a power of two"),
        (-2, 1, "is not a power of two"),
    ],
)
def test_what_is_no_pipeline_group_is_refused(pp: int, tp: int, reason: str) -> None:
    with pytest.raises(StagedError, match=reason):
        Staged(pp, tp)
