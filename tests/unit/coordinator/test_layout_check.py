"""Every layout that cannot be is refused with its reason."""

import pytest

from comm_pool.layout import Layout, Rank, parse_layout
from coordinator.model.weight_parts import WeightParts
from coordinator.protocol.terms import Phase, Stage
from coordinator.ranks.layout_check import why_unreachable
from coordinator.ranks.roster import Roster
from tests.harness.coordinator.builders import hello, report

EVERYONE = tuple(map(Rank, range(4)))


def roster(world: int = 4, widths: tuple[int, ...] = (1, 2)) -> Roster:
    made = Roster(world)
    for rank in range(world):
        made.on_hello(hello(rank, widths=widths), 0)
    return made


def wanted(text: str, world: int = 4) -> Layout:
    return parse_layout(text, world, (1, 2, 4, 8))


@pytest.mark.parametrize("text", ["dp4", "tp2+dp2", "dp2+tp2", "tp2+tp2"])
def test_what_can_be_is_not_refused(text: str) -> None:
    assert why_unreachable(wanted(text), roster(), EVERYONE) is None


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (wanted("tp4"), "rank 0 does not support groups 4 wide"),
        (wanted("sp2+dp2"), "rank 0 cannot compute this model in sp 2 wide: use 'tp2'"),
        (wanted("dp2+shift2"), "rank 2 cannot compute this model in sp 2 wide: use 'tp2'"),
        (wanted("dp3+off1"), "rank 3 is available but not in the layout"),
        (wanted("dp8", 8), "rank 4 does not exist: use ranks 0 to 3"),
        (
            wanted("dp2+pp2"),
            "rank 2 has not prepared pp2: start the cell with --pipelines pp2, or use 'tp2'.",
        ),
    ],
)
def test_what_cannot_be_is_refused(layout: Layout, reason: str) -> None:
    answer = why_unreachable(layout, roster(), EVERYONE)
    assert answer is not None
    assert answer.startswith(reason)


@pytest.mark.parametrize("text", ["sp2tp2", "shift2tp2"])
def test_mixed_groups_need_to_be_prepared(text: str) -> None:
    ranks = roster(8, (1, 4, 8))
    everyone = tuple(map(Rank, range(8)))
    assert why_unreachable(wanted(f"dp4+{text}", 8), ranks, everyone) is None
    wide = text.replace("tp2", "tp4")
    assert why_unreachable(wanted(wide, 8), ranks, everyone) == (
        "rank 0 has not prepared sp2tp4 for this model: start the cell with --mixed sp2tp4, or "
        "use 'tp8'."
    )


def test_a_rank_that_is_cut_out_cannot_be_used() -> None:
    answer = why_unreachable(wanted("dp4"), roster(), EVERYONE[:3])
    assert answer == "rank 3 is not available; write 'off1' in its place."
    assert why_unreachable(wanted("dp3+off1"), roster(), EVERYONE[:3]) is None


def test_a_rank_that_was_never_heard_is_not_available() -> None:
    ranks = Roster(4)
    for rank in range(3):
        ranks.on_hello(hello(rank), 0)
    answer = why_unreachable(wanted("tp4"), ranks, EVERYONE[:3])
    assert answer == "rank 3 is not available; write 'off1' in its place."


def test_a_rank_that_was_restarted_without_its_peers_serves_alone() -> None:
    ranks = roster()
    ranks.on_hello(hello(1, 2, widths=(1,), cohort=7), 0)
    answer = why_unreachable(wanted("tp2+dp2"), ranks, EVERYONE)
    assert answer is not None
    assert answer.startswith("rank 1 was restarted without all others of tp2")
    assert why_unreachable(wanted("dp2+tp2"), ranks, EVERYONE) is None


def test_a_closed_group_is_refused_until_its_ranks_are_renewed() -> None:
    ranks = roster(4, (1, 2, 4))
    closed = report(2, Stage(1, Phase.PARK), closed=[EVERYONE])
    assert ranks.on_report(closed, 1)
    assert why_unreachable(wanted("tp4"), ranks, EVERYONE) == (
        "rank 2 aborted tp4 of ranks 0 to 3 after a member was lost: use other groups, or run "
        "`aileron renew`, which restarts all ranks."
    )
    assert why_unreachable(wanted("sp4"), ranks, EVERYONE) is not None, "whatever it computes in"
    assert why_unreachable(wanted("tp2+tp2"), ranks, EVERYONE) is None
    for rank in range(4):
        ranks.on_hello(hello(rank, 2, widths=(1, 2, 4), cohort=7), 2)
    assert why_unreachable(wanted("tp4"), ranks, EVERYONE) is None


def test_ranks_that_were_restarted_together_can_be_a_group() -> None:
    ranks = roster(4, (1, 2, 4))
    for rank in (0, 1):
        ranks.on_hello(hello(rank, 2, widths=(1, 2), cohort=7), 0)
    assert why_unreachable(wanted("tp2+tp2"), ranks, EVERYONE) is None
    answer = why_unreachable(wanted("tp4"), ranks, EVERYONE)
    assert answer is not None
    assert answer.startswith("rank 0 was restarted without all others of tp4")


@pytest.mark.parametrize("text", ["dp4", "tp2+tp2", "tp2+dp2", "off4"])
def test_where_ranks_hold_parts_of_the_weights_groups_have_all_of_them(text: str) -> None:
    made = roster(widths=(1, 4))
    made.narrowest = 4
    reason = why_unreachable(wanted(text), made, EVERYONE)
    assert reason is not None
    assert "one of several parts of the weights, so groups are 4 wide" in reason
    assert reason.endswith("or start the cell with --borrow ffn.")
    assert why_unreachable(wanted("tp4"), made, EVERYONE) is None


def test_where_ranks_hold_parts_of_the_weights_there_is_no_plain_sp() -> None:
    made = roster(widths=(1, 2))
    made.narrowest = 2
    reason = why_unreachable(wanted("sp2+tp2"), made, EVERYONE)
    assert reason == (
        "sp2 needs all of the weights on each rank, which holds only one of several parts of the "
        "weights: use 'tp2' or a mixed mode, or start the cell with --borrow ffn."
    )


def halves(*, outlive: bool = False) -> Roster:
    """Four ranks with a half of the weights each: ranks 0 and 1 the first, 2 and 3 the other."""
    made = Roster(4, 1, WeightParts(2, 4, borrows=True, outlive=outlive))
    for rank in range(4):
        made.on_hello(hello(rank, widths=(1, 2, 4)), 0)
    return made


@pytest.mark.parametrize("text", ["dp4", "sp4", "tp2+tp2", "tp2+dp2", "tp4"])
def test_ranks_that_borrow_serve_in_every_layout(text: str) -> None:
    assert why_unreachable(wanted(text), halves(), EVERYONE) is None


def test_a_layout_whose_groups_cannot_borrow_a_part_is_refused() -> None:
    made = halves()
    for rank in (2, 3):
        made.on_exited(Rank(rank))
    assert why_unreachable(wanted("dp2+off2"), made, EVERYONE[:2]) == (
        "dp1 of rank 0 lacks part 1 of the weights, and the memory of rank 2 or 3, which holds it, "
        "cannot be read: wait until that rank is back."
    )
    outlived = halves(outlive=True)
    for rank in (2, 3):
        outlived.on_exited(Rank(rank))
    assert why_unreachable(wanted("dp2+off2"), outlived, EVERYONE[:2]) is None
