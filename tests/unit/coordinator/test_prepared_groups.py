"""Mixed and pipeline groups that ranks prepare, and the sentence for each that they cannot."""

import re
from dataclasses import dataclass, replace

import pytest

from comm_pool.layout import Group, parse_layout
from comm_pool.mixed import Mixed, Staged
from coordinator.protocol.prepared_groups import mixed_groups, pipeline_groups


@dataclass(frozen=True)
class CellOptions:
    """A section `cell`."""

    device: str = "cpu"
    widths: tuple[int, ...] = (1, 2, 4, 8)
    mixed: tuple[str, ...] = ()
    pipelines: tuple[str, ...] = ()
    weight_parts: int = 1


def groups(text: str) -> tuple[Group, ...]:
    return parse_layout(text, 8, (1, 2, 4, 8)).groups


def test_pipeline_groups_are_those_named_and_those_of_the_layout() -> None:
    plain, named = CellOptions(), CellOptions(pipelines=("pp8", "pp2", "pp2"))
    assert pipeline_groups(plain, groups("dp8")) == ()
    assert pipeline_groups(plain, groups("pp4+tp2+dp2")) == (Staged(4),)
    assert pipeline_groups(named, groups("pp4+pp4")) == (Staged(2), Staged(4), Staged(8))


def test_mixed_groups_are_no_pipeline_groups() -> None:
    cell = CellOptions(mixed=("sp2tp2",), pipelines=("pp4",))
    layout = groups("shift2tp4")
    assert mixed_groups(cell, layout) == (Mixed(2, 2), Mixed(2, 4))
    assert pipeline_groups(cell, layout) == (Staged(4),)
    assert mixed_groups(cell, groups("pp8")) == (Mixed(2, 2),)


@pytest.mark.parametrize(
    ("cell", "layout", "reason"),
    [
        (
            CellOptions(pipelines=("pp3",)),
            "dp8",
            "cell.pipelines: pp3 in 'pp3' is not a power of two.",
        ),
        (
            CellOptions(pipelines=("tp4",)),
            "dp8",
            "cell.pipelines: 'tp4' is not a pipeline group, such as 'pp2'.",
        ),
        (
            CellOptions(widths=(1, 4), pipelines=("pp2tp2",)),
            "dp8",
            "cell.pipelines: pp2tp2 needs groups 2 wide: add that to cell.widths (--widths), or "
            "leave it out.",
        ),
        (
            CellOptions(widths=(1, 2, 8)),
            "pp2tp4",
            "cell.pipelines: pp2tp4 needs groups 4 wide: add that to cell.widths (--widths), or "
            "leave it out.",
        ),
        (
            CellOptions(device="cuda", pipelines=("pp2tp2",)),
            "dp8",
            "pp2tp2 has stages of 2 ranks, which only CPU ranks run yet: use 'pp4' or 'tp4', or "
            "cell.device cpu.",
        ),
        (
            CellOptions(device="cuda"),
            "dp4+pp2tp2",
            "pp2tp2 has stages of 2 ranks, which only CPU ranks run yet: use 'pp4' or 'tp4', or "
            "cell.device cpu.",
        ),
        (
            CellOptions(weight_parts=2, pipelines=("pp4",)),
            "dp8",
            "pp4 is a pipeline group, which needs all of the weights on each rank: use 'tp4', or "
            "leave out --weight-parts.",
        ),
        (
            CellOptions(widths=(1, 2), pipelines=("pp2", "pp4")),
            "dp8",
            "cell.pipelines: pp4 needs groups 4 wide: add that to cell.widths (--widths), or leave "
            "it out.",
        ),
        (
            CellOptions(widths=(1, 2)),
            "pp8",
            "cell.pipelines: pp8 needs groups 8 wide: add that to cell.widths (--widths), or leave "
            "it out.",
        ),
    ],
)
def test_what_ranks_cannot_prepare_is_refused_in_one_sentence(
    cell: CellOptions, layout: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        pipeline_groups(cell, groups(layout))


@pytest.mark.parametrize(
    ("cell", "layout", "reason"),
    [
        (
            CellOptions(mixed=("sp2",)),
            "dp8",
            "cell.mixed: 'sp2' is not a mixed group, such as 'sp2tp2'.",
        ),
        (
            CellOptions(mixed=("sp1tp2",)),
            "dp8",
            "cell.mixed: 'sp1tp2' shares out no tokens; use 'tp2'.",
        ),
        (
            CellOptions(widths=(1, 4), mixed=("sp2tp2",)),
            "dp8",
            "cell.mixed: sp2tp2 needs groups 2 wide: add that to cell.widths (--widths), or leave "
            "it out.",
        ),
        (
            CellOptions(weight_parts=4),
            "dp4+sp2tp2",
            "sp2tp2 computes with 2 parts of the weights, and ranks hold one of 4: use mixed "
            "shapes whose tp is a multiple of cell.weight_parts.",
        ),
    ],
)
def test_mixed_groups_that_ranks_cannot_prepare_are_refused_likewise(
    cell: CellOptions, layout: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        mixed_groups(cell, groups(layout))


def test_parts_of_the_weights_need_their_own_mixed_shape() -> None:
    cell = CellOptions(widths=(1, 2, 4), weight_parts=2)
    assert mixed_groups(cell, ()) == (Mixed(2, 2),)
    assert mixed_groups(replace(cell, weight_parts=4), ()) == ()
    with pytest.raises(ValueError, match="sp2tp2 needs groups 2 wide"):
        mixed_groups(replace(cell, widths=(1, 4)), ())
