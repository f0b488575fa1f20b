"""Ranks copy KV while their groups serve: what their cores ask for, and what it comes to."""

import gc
from collections.abc import Iterator

import pytest

from coordinator.protocol.messages.rank import Grant, PreCopyOrder
from coordinator.protocol.terms import Carry, Phase
from tests.harness.worker.core_cell import CoreCell, CoreRank, kinds
from tests.harness.worker.fake_scheduler import FakeScheduler, token_at

TOKENS = 30


@pytest.fixture(autouse=True)
def collections_go_on() -> Iterator[None]:
    """A rank that leaves its group pauses them for its process, which is that of all tests."""
    yield
    gc.enable()


def busy(layout: str, groups: int) -> CoreCell:
    """A cell with a task in each group, after some steps."""
    cell = CoreCell(layout)
    for group in range(groups):
        cell.place_task(f"task-{group}", group, range(50 * group, 50 * group + 40), TOKENS)
    cell.turn(4)
    return cell


def order_of(cell: CoreCell, number: int = 1, pages: int = 20) -> PreCopyOrder:
    olds = {
        each.participant.binding.group.ranks
        for each in cell.ranks
        if each.participant.binding is not None
    }
    return PreCopyOrder(number, tuple(Grant(ranks, pages) for ranks in sorted(olds)))


def copy_early(cell: CoreCell, layout: str) -> None:
    """Let all ranks copy in a round, and serve on."""
    cell.retarget(layout)
    wanted = cell.wanted(Phase.PARK, Carry.RESHARD, precopy=order_of(cell))

    def is_over() -> bool:
        found = [each.reports[-1].precopy for each in cell.ranks]
        return all(each is not None and each.round == 1 for each in found)

    cell.ask(wanted, ends=is_over)


def finish_move(cell: CoreCell) -> None:
    cell.ask(cell.wanted(Phase.PARK, Carry.RESHARD), ends=cell.all_parked)
    cell.ask(cell.wanted(Phase.MOVE, Carry.RESHARD))
    assert not any(each.reports[-1].has_failed for each in cell.ranks)
    cell.moved = cell.epoch
    for phase in (Phase.SWAP, Phase.SERVE):
        cell.ask(cell.wanted(phase, Carry.RESHARD))


def check_streams(cell: CoreCell) -> None:
    cell.turn(60)
    for name, prompt in cell.prompts.items():
        expected = [token_at(prompt, len(prompt) + number) for number in range(TOKENS)]
        assert cell.streams[name] == expected
    assert not any(each.returned for each in cell.ranks), "a task is computed again"
    for each in cell.ranks:
        each.engine.pages.integrity(full=True)


def scheduler_of(rank: CoreRank) -> FakeScheduler:
    binding = rank.participant.binding
    assert binding is not None
    scheduler = rank.engine.of_width(binding.group.width).scheduler
    assert scheduler is not None
    return scheduler


def copied_blocks(rank: CoreRank) -> int:
    precopy = rank.runtime.migration.precopy
    return sum(each.slots.size for each in precopy.held(precopy.epoch))


@pytest.mark.parametrize(("old", "groups", "new"), [("dp2", 2, "tp2"), ("tp2", 1, "dp2")])
def test_tasks_run_on_while_their_full_blocks_are_copied(old: str, groups: int, new: str) -> None:
    cell = busy(old, groups)
    before = {name: len(tokens) for name, tokens in cell.streams.items()}
    copy_early(cell, new)
    assert sum(map(copied_blocks, cell.ranks)) >= 1
    assert all(each.participant.serving for each in cell.ranks)
    cell.turn(2)
    assert all(len(cell.streams[name]) > count for name, count in before.items())
    early = {each.core._rank: copied_blocks(each) for each in cell.ranks}
    finish_move(cell)
    assert any(early.values())
    check_streams(cell)


def test_what_was_copied_early_is_not_copied_again() -> None:
    moved = {}
    for is_early in (False, True):
        cell = busy("dp2", 2)
        cell.retarget("tp2")
        if is_early:
            cell.epoch -= 1
            copy_early(cell, "tp2")
        finish_move(cell)
        cell.turn(3)
        times = [each.times for rank in cell.ranks for each in rank.reports]
        moved[is_early] = sum(each.reshard_bytes for some in times for each in some)
        check_streams(cell)
    assert 0 < moved[True] < moved[False]


@pytest.mark.parametrize("carry", [Carry.PAUSE, Carry.DRAIN, Carry.RECOMPUTE])
@pytest.mark.parametrize(("old", "groups", "new"), [("dp2", 2, "tp2"), ("tp2", 1, "dp2")])
def test_another_plan_gives_the_pages_back(old: str, groups: int, new: str, carry: Carry) -> None:
    cell = busy(old, groups)
    total = [scheduler_of(each).blocks_total for each in cell.ranks if each.participant.is_leader]
    copy_early(cell, new)
    leaders = [each for each in cell.ranks if each.participant.is_leader]
    schedulers = [scheduler_of(each) for each in leaders]
    assert any(each.aside for each in schedulers)
    assert [each.blocks_total for each in schedulers] != total
    message = cell.wanted(Phase.PARK, carry)
    for each in cell.ranks:
        each.hear(message)
    asked = [kinds(each.turn()) for each in leaders]
    assert all("EndPreCopy" in each for each in asked)
    assert not any(each.aside for each in schedulers)
    cell.turn(3)
    assert not any(copied_blocks(each) for each in cell.ranks)
    for each in cell.ranks:
        each.engine.pages.integrity(full=True)


def test_a_task_that_ends_meanwhile_is_not_carried() -> None:
    cell = CoreCell("dp2")
    cell.place_task("short", 0, range(40), 6)
    cell.place_task("long", 1, range(50, 90), TOKENS)
    cell.turn(3)
    copy_early(cell, "tp2")
    cell.turn(8)
    assert len(cell.streams["short"]) == 6
    cell.prompts.pop("short")
    finish_move(cell)
    check_streams(cell)


def test_leaders_set_nothing_aside_without_a_grant() -> None:
    cell = busy("dp2", 2)
    cell.retarget("tp2")
    order = PreCopyOrder(1, ())
    wanted = cell.wanted(Phase.PARK, Carry.RESHARD, precopy=order)
    cell.ask(wanted, ends=lambda: all(each.reports[-1].precopy for each in cell.ranks))
    assert not any(scheduler_of(each).aside for each in cell.ranks)
    finish_move(cell)
    check_streams(cell)
