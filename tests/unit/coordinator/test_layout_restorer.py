"""Layouts that were left because of a loss come back, and ranks start again while nobody waits."""

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from comm_pool.layout import Rank
from coordinator.model.events import Effect, RankExited, RenewalWanted, ToLauncher
from coordinator.model.weight_parts import WeightParts
from coordinator.protocol.messages.gateway import Cancel
from coordinator.protocol.messages.rank import RankHello
from coordinator.protocol.messages.tasks import HeldTask
from coordinator.protocol.terms import TaskId
from coordinator.switching.layout_restorer import RENEWALS_APART_MS
from tests.harness.coordinator.builders import submit
from tests.transcripts.cell import WIDTHS, Cell, ObedientRank

SETTLED_MS = 3_000
IDLE_MS = 60_000
BUSY_MS = 120_000


def cell_of(layout: str, **settings: object) -> Cell:
    cell = Cell(layout, settled_ms=SETTLED_MS, **settings)
    cell.serve()
    return cell


def lose(cell: Cell, *ranks: int) -> None:
    """Their processes end, and new ones are started each alone."""
    for rank in ranks:
        cell.event(RankExited(Rank(rank)))
    cell.settle(*(rank for rank in range(cell.settings.world) if rank not in ranks))
    for rank in ranks:
        cell.restart(rank)
        cell.open(rank)
    cell.settle()


def start_together(cell: Cell, *ranks: int) -> None:
    """Processes of a higher incarnation, which is their cohort as well."""
    number = 1 + max(process.participant.incarnation for process in cell.ranks.values())
    for rank in ranks:
        cell.event(RankExited(Rank(rank)))
    cell.tick(100)
    for rank in map(Rank, ranks):
        cell.ranks[rank] = ObedientRank(rank, number, WIDTHS)
    for rank in ranks:
        cell.open(rank)
    cell.settle()


def pass_time(cell: Cell, ms: int) -> None:
    """Let time pass in steps, in each of which all ranks are heard."""
    for _ in range(0, ms, 1_000):
        cell.tick(1_000)
        cell.settle()


def layout_of(cell: Cell) -> str:
    view: Any = cell.core.views.layout()
    assert view["serving"]
    return str(view["layout"])


def renewals(effects: list[Effect]) -> list[tuple[tuple[int, int], ...]]:
    return [each.message.ranks for each in effects if isinstance(each, ToLauncher)]


def test_a_layout_that_was_left_comes_back_when_it_can_be_formed() -> None:
    cell = cell_of("tp4")
    lose(cell, 1)
    pass_time(cell, 10_000)
    assert layout_of(cell) == "dp4", "rank 1 has no communicators"
    start_together(cell, 0, 1, 2, 3)
    pass_time(cell, SETTLED_MS - 1_000)
    assert layout_of(cell) == "dp4"
    pass_time(cell, 2_000)
    assert layout_of(cell) == "tp4"
    decisions: Any = cell.core.views.decisions(1)["decisions"]
    assert decisions[-1]["cause"] == "restored"


def test_what_an_operator_wants_now_is_what_comes_back() -> None:
    cell = cell_of("tp4")
    cell.switch("tp2+tp2")
    cell.settle()
    start_together(cell, 2, 3)
    assert layout_of(cell) == "tp2+dp2"
    pass_time(cell, 5_000)
    assert layout_of(cell) == "tp2+tp2"
    cell.switch("dp4")
    cell.settle()
    lose(cell, 0)
    pass_time(cell, 10_000)
    assert layout_of(cell) == "dp4"


def test_a_rank_that_is_soon_lost_again_moves_nobody() -> None:
    cell = cell_of("tp2+tp2")
    for _ in range(3):
        start_together(cell, 0, 1)
        pass_time(cell, SETTLED_MS - 1_000)
        assert layout_of(cell) == "dp2+tp2"
    epoch = cell.core.views.epoch
    pass_time(cell, 2_000)
    assert layout_of(cell) == "tp2+tp2"
    assert cell.core.views.epoch == epoch + 1


def test_a_coordinator_that_starts_behind_a_switch_wants_what_is_there() -> None:
    cell = cell_of("tp4")
    cell.switch("dp4")
    cell.settle()
    cell.start()
    for rank in cell.ranks:
        cell.open(rank)
        cell.report(rank)
    pass_time(cell, 10_000)
    assert layout_of(cell) == "dp4", "what it was started with is long past"


def test_a_coordinator_and_a_rank_that_are_lost_together_cost_the_layout_nothing() -> None:
    cell = cell_of("tp4")
    cell.start()
    cell.restart(3)
    for rank in cell.ranks:
        cell.open(rank)
        cell.report(rank)
    pass_time(cell, 10_000)
    assert layout_of(cell) == "dp4"
    start_together(cell, 0, 1, 2, 3)
    pass_time(cell, 5_000)
    assert layout_of(cell) == "tp4"


# Starting all ranks again


def test_ranks_start_again_once_nobody_has_asked_for_anything() -> None:
    cell = cell_of("tp4", renew_idle_ms=IDLE_MS)
    pass_time(cell, 2 * IDLE_MS)
    assert not renewals(cell.take()), "nothing is missed"
    lose(cell, 1)
    pass_time(cell, IDLE_MS)
    assert not renewals(cell.take())
    pass_time(cell, 2_000)
    assert renewals(cell.take()) == [((0, 1), (1, 2), (2, 1), (3, 1))]
    pass_time(cell, RENEWALS_APART_MS - 10_000)
    assert not renewals(cell.take()), "it was asked for once"
    pass_time(cell, 20_000 + IDLE_MS)
    assert len(renewals(cell.take())) == 1


def test_as_long_as_there_is_a_task_no_rank_starts_again() -> None:
    cell = cell_of("tp4", renew_idle_ms=IDLE_MS)
    lose(cell, 1)
    cell.gateway()
    for number in range(6):
        cell.say(submit(f"t{number}"))
        pass_time(cell, IDLE_MS // 2)
        cell.say(Cancel(TaskId(f"t{number}")))
        pass_time(cell, IDLE_MS // 2)
    assert not renewals(cell.take())


@pytest.mark.parametrize(
    ("layout", "lost", "settings"),
    [
        ("dp4", 1, {"renew_idle_ms": IDLE_MS}),
        ("tp2+dp2", 3, {"renew_idle_ms": IDLE_MS}),
        ("tp4", 1, {"renew_idle_ms": 0}),
    ],
)
def test_ranks_do_not_start_again_for_groups_that_nobody_wants(
    layout: str, lost: int, settings: dict[str, int]
) -> None:
    cell = cell_of(layout, **settings)
    lose(cell, lost)
    pass_time(cell, 3 * IDLE_MS)
    assert not renewals(cell.take())


def stop_for_a_while(cell: Cell, rank: int, closed_by: int | None = None) -> None:
    """The process stands still, is left out, and goes on; its group may be closed meanwhile."""
    others = [each for each in range(cell.settings.world) if each != rank]
    for _ in range(cell.settings.lost_after_ms // 1_000 + 1):
        cell.tick(1_000)
        cell.settle(*others)
    assert "off1" in layout_of(cell)
    if closed_by is not None:
        group = cell.ranks[Rank(rank)].participant.binding
        assert group is not None
        cell.ranks[Rank(closed_by)].closed = (group.group.ranks,)
    cell.settle()


def test_ranks_start_again_for_a_group_that_was_closed() -> None:
    """Rank 1 was only stopped, but the others got out of their group without it."""
    cell = cell_of("tp2+tp2", renew_idle_ms=IDLE_MS)
    stop_for_a_while(cell, 1)
    pass_time(cell, 5_000)
    assert layout_of(cell) == "tp2+tp2", "it can be formed again, as nobody has closed it"
    stop_for_a_while(cell, 1, closed_by=0)
    pass_time(cell, IDLE_MS - 2_000)
    assert layout_of(cell) == "dp2+tp2"
    assert not renewals(cell.take())
    pass_time(cell, 5_000)
    assert renewals(cell.take()) == [tuple((rank, 1) for rank in range(4))]


def test_a_group_that_is_to_be_formed_when_it_is_closed_is_done_without() -> None:
    """A member may take longer to get out than another takes to come back."""
    cell = cell_of("dp4")
    cell.switch("tp2+tp2")
    cell.settle(2, 3)
    cell.ranks[Rank(1)].closed = ((Rank(0), Rank(1)),)
    cell.settle()
    assert layout_of(cell) == "dp2+tp2"
    decisions: Any = cell.core.views.decisions(1)["decisions"]
    assert decisions[-1]["cause"] == "closed"
    epoch = cell.core.views.epoch
    pass_time(cell, 5_000)
    assert cell.core.views.epoch == epoch, "once is enough"


def test_ranks_do_not_start_again_for_a_closed_group_that_nobody_wants() -> None:
    cell = cell_of("tp2+tp2", renew_idle_ms=IDLE_MS)
    cell.ranks[Rank(0)].closed = (tuple(map(Rank, range(4))),)
    pass_time(cell, 3 * IDLE_MS)
    assert not renewals(cell.take())


def test_ranks_do_not_start_again_while_one_is_missing() -> None:
    cell = cell_of("tp4", renew_idle_ms=IDLE_MS)
    lose(cell, 0)
    cell.event(RankExited(Rank(2)))
    cell.settle(0, 1, 3)
    for _ in range(3 * IDLE_MS // 1_000):
        cell.tick(1_000)
        cell.settle(0, 1, 3)
    assert not renewals(cell.take())


def test_an_operator_can_ask_for_it_at_any_time() -> None:
    cell = cell_of("dp4")
    cell.event(RenewalWanted())
    assert renewals(cell.take()) == [tuple((rank, 1) for rank in range(4))]
    cell.event(RenewalWanted((Rank(2), Rank(3))))
    assert renewals(cell.take()) == [((2, 1), (3, 1))]


# Starting the ranks of one group again, while the others serve


def test_under_load_the_ranks_of_one_group_start_again_and_it_comes_back() -> None:
    cell = cell_of("tp2+tp2", renew_idle_ms=IDLE_MS, renew_busy_ms=BUSY_MS)
    cell.gateway()
    cell.say(submit("long"))
    lose(cell, 1)
    pass_time(cell, BUSY_MS - 5_000)
    assert not renewals(cell.take())
    assert layout_of(cell) == "dp2+tp2"
    pass_time(cell, 10_000)
    assert renewals(cell.take()) == [((0, 1), (1, 2))], "the other group serves on"
    start_together(cell, 0, 1)
    pass_time(cell, SETTLED_MS + 2_000)
    assert layout_of(cell) == "tp2+tp2"
    pass_time(cell, RENEWALS_APART_MS + BUSY_MS)
    assert not renewals(cell.take()), "nothing is missed any more"


def test_a_group_of_all_ranks_waits_for_a_pause_as_nobody_would_serve() -> None:
    cell = cell_of("tp4", renew_idle_ms=IDLE_MS, renew_busy_ms=BUSY_MS)
    cell.gateway()
    cell.say(submit("long"))
    lose(cell, 1)
    pass_time(cell, 3 * BUSY_MS)
    assert not renewals(cell.take())


def test_two_groups_are_not_started_again_at_once() -> None:
    cell = cell_of("tp2+tp2", renew_busy_ms=BUSY_MS)
    lose(cell, 1, 2)
    pass_time(cell, BUSY_MS + 5_000)
    assert renewals(cell.take()) == [((0, 1), (1, 2))]
    start_together(cell, 0, 1)
    pass_time(cell, BUSY_MS - 5_000)
    assert not renewals(cell.take()), "one after the other"
    pass_time(cell, 10_000)
    assert renewals(cell.take()) == [((2, 2), (3, 1))]
    start_together(cell, 2, 3)
    pass_time(cell, SETTLED_MS + 2_000)
    assert layout_of(cell) == "tp2+tp2"


def test_a_group_that_cannot_be_had_is_not_tried_all_the_time() -> None:
    cell = cell_of("tp2+tp2", renew_busy_ms=BUSY_MS)
    lose(cell, 1)
    pass_time(cell, BUSY_MS + RENEWALS_APART_MS - 10_000)
    assert len(renewals(cell.take())) == 1
    pass_time(cell, 20_000)
    assert len(renewals(cell.take())) == 1


def test_a_group_that_lacks_nothing_for_long_is_left_alone() -> None:
    """It was closed, and its members were started again for another reason."""
    cell = cell_of("tp2+tp2", renew_busy_ms=BUSY_MS)
    for _ in range(4):
        lose(cell, 1)
        pass_time(cell, BUSY_MS // 2)
        start_together(cell, 0, 1)
        pass_time(cell, BUSY_MS)
        assert layout_of(cell) == "tp2+tp2"
    assert not renewals(cell.take())


class Joiner(ObedientRank):
    """A new process that shares memory with those that were there first."""

    def hello(self, held: Iterable[HeldTask] = (), max_tasks: int = 4) -> RankHello:
        return replace(super().hello(held, max_tasks), cohort=0)


def test_ranks_with_parts_of_the_weights_wait_for_each_other() -> None:
    """Alone they take no task; the group is formed as soon as all are there again."""
    cell = Cell("tp4", narrowest=4, settled_ms=0)
    cell.serve()
    cell.gateway()
    cell.event(RankExited(Rank(2)))
    cell.settle(0, 1, 3)
    cell.say(submit("t"))
    cell.tick(100)
    view: Any = cell.core.views.layout()
    assert (view["target"], view["serving"]) == ("dp2+off1+dp1", False)
    queue: Any = cell.core.views.queue()
    assert queue["tasks"]["queued"] == 1, queue
    cell.ranks[Rank(2)] = Joiner(Rank(2), 2, WIDTHS)
    cell.open(2)
    cell.settle()
    cell.tick(100)
    cell.settle()
    assert layout_of(cell) == "tp4"


@pytest.mark.parametrize("outlive", [True, False])
def test_ranks_that_borrow_serve_alone_as_long_as_the_lost_one_lends(outlive: bool) -> None:
    """On CPU its memory does; on CUDA nobody serves until the block has started together."""
    parts = WeightParts(4, 4, borrows=True, outlive=outlive)
    cell = Cell("tp4", parts=parts, settled_ms=SETTLED_MS)
    cell.serve()
    cell.gateway()
    cell.event(RankExited(Rank(2)))
    cell.settle(0, 1, 3)
    cell.say(submit("t"))
    cell.tick(100)
    view: Any = cell.core.views.layout()
    assert (view["target"], view["serving"]) == ("dp2+off1+dp1", outlive)
    queue: Any = cell.core.views.queue()
    assert queue["tasks"]["queued"] == (0 if outlive else 1)
    if outlive:
        cell.ranks[Rank(2)] = Joiner(Rank(2), 2, WIDTHS)
        cell.open(2)
        cell.settle()
    else:
        start_together(cell, 0, 1, 2, 3)
    cell.tick(100)
    cell.settle()
    assert layout_of(cell) == "dp4"
    pass_time(cell, SETTLED_MS + 2_000)
    assert layout_of(cell) == "tp4"


def test_a_coordinator_that_finds_them_waiting_wants_the_first_layout() -> None:
    cell = Cell("tp4", narrowest=4, settled_ms=0)
    cell.serve()
    cell.event(RankExited(Rank(2)))
    cell.settle(0, 1, 3)
    cell.start()
    for rank in (0, 1, 3):
        cell.open(rank)
        cell.report(rank)
    cell.tick(20_000)
    cell.ranks[Rank(2)] = Joiner(Rank(2), 2, WIDTHS)
    cell.open(2)
    cell.settle()
    pass_time(cell, 5_000)
    assert layout_of(cell) == "tp4"


@pytest.mark.parametrize("first", ["tp2+tp2", "tp4"])
def test_ranks_that_were_away_when_a_layout_was_decided_get_groups(first: str) -> None:
    """With parts of the weights they could not serve alone, and nobody would ask again."""
    cell = Cell(first, narrowest=2, settled_ms=0)
    cell.serve()
    for rank in (2, 3):
        cell.event(RankExited(Rank(rank)))
    cell.settle(0, 1)
    cell.switch("tp2+off2")
    cell.settle(0, 1)
    assert layout_of(cell) == "tp2+off2"
    for rank in (2, 3):
        cell.ranks[Rank(rank)] = Joiner(Rank(rank), 2, WIDTHS)
        cell.open(rank)
        cell.settle()
    pass_time(cell, 5_000)
    assert layout_of(cell) == "tp2+tp2"
