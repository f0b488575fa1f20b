"""A cell in memory whose ranks copy KV while they serve, as the test orders."""

from coordinator.protocol.messages.rank import Grant, PreCopyOrder
from coordinator.protocol.terms import Carry, Phase
from tests.harness.worker.core_cell import CoreCell, CoreRank
from tests.harness.worker.fake_scheduler import FakeScheduler, token_at

TOKENS = 30
"""Of each answer."""


def busy(layout: str, groups: int) -> CoreCell:
    """A cell with a task in each group, after some steps."""
    cell = CoreCell(layout)
    for group in range(groups):
        cell.place_task(f"task-{group}", group, range(50 * group, 50 * group + 40), TOKENS)
    cell.turn(4)
    return cell


def order_of(
    cell: CoreCell, number: int = 1, pages: int = 20, *, drafts: bool = False
) -> PreCopyOrder:
    olds = {
        each.participant.binding.group.ranks
        for each in cell.ranks
        if each.participant.binding is not None
    }
    return PreCopyOrder(number, tuple(Grant(ranks, pages) for ranks in sorted(olds)), drafts)


def copy_early(cell: CoreCell, layout: str, number: int = 1, *, drafts: bool = False) -> None:
    """Let all ranks copy in a round, and serve on."""
    if number == 1:
        cell.retarget(layout)
    order = order_of(cell, number, drafts=drafts)
    wanted = cell.wanted(Phase.PARK, Carry.RESHARD, precopy=order)
    cell.ask(wanted, ends=lambda: is_over(cell, number))


def is_over(cell: CoreCell, number: int) -> bool:
    """Return whether all ranks have reported the end of this round."""
    found = [each.reports[-1].precopy for each in cell.ranks]
    return all(each is not None and each.round == number for each in found)


def leave_groups(cell: CoreCell, drafted: int = 0) -> None:
    """Let all ranks leave and publish; all have drafted the plan in this round."""
    cell.ask(cell.wanted(Phase.PARK, Carry.RESHARD, drafted=drafted), ends=cell.all_parked)


def finish_move(cell: CoreCell, drafted: int = 0) -> None:
    """Let all ranks leave, move and serve."""
    leave_groups(cell, drafted)
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
