"""Pipeline groups: their notation, and what is none."""

import pytest

from comm_pool.mixed import Staged, StagedError, read_staged


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


@pytest.mark.parametrize("staged", [Staged(2), Staged(4), Staged(16, 8), Staged(4096)], ids=str)
def test_what_is_written_is_read(staged: Staged) -> None:
    assert read_staged(str(staged)) == staged


def test_stages_of_one_rank_may_say_so() -> None:
    assert read_staged("pp4tp1") == Staged(4)


@pytest.mark.parametrize(
    "text",
    [
        *("", "pp", "pp0", "pp04", "4", "tp4", "pp2tp", "pp2tp02", "PP2", "pp2 ", "pp2\n"),
        *("pp2sp2", "tp2pp2", "pp10000", "pp-2", "pp2.0", "pp\u0662"),
    ],
)
def test_other_notations_are_refused(text: str) -> None:
    with pytest.raises(StagedError) as refusal:
        read_staged(text)
    assert str(refusal.value) == f"'{text}' is not a pipeline group, such as 'pp2'."


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pp3", "pp3 in 'pp3' is not a power of two."),
        ("pp2tp6", "tp6 in 'pp2tp6' is not a power of two."),
        ("pp1", "'pp1' has a single stage; use 'dp1'."),
        ("pp1tp4", "'pp1tp4' has a single stage; use 'tp4'."),
    ],
)
def test_impossible_numbers_are_refused_where_they_are_read(text: str, reason: str) -> None:
    with pytest.raises(StagedError) as refusal:
        read_staged(text)
    assert str(refusal.value) == reason
