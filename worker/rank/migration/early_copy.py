"""What a rank has copied of running tasks before their groups were left, and if it is still true.

Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvadaptor.reshard.terms import EarlyBlocks, Ints
from worker.rank.task_state import RunningState


@dataclass(frozen=True, slots=True, eq=False)
class EarlyCopy:
    """Blocks of one task that this rank copied while the task's old group served.

    `blocks`, `places` and `slots` are (n,): logical block `blocks[i]` of the old group, the task's
    block `places[i]`, lies in slot `slots[i]` of this rank, as its group of `width` reads it. That
    is true if the old leader still has the same attempt, which has lost no blocks since.
    """

    task: str
    leader: int
    attempt: int
    preemptions: int
    width: int
    places: Ints
    blocks: Ints
    slots: Ints


def true_blocks(
    early: Mapping[int, Iterable[EarlyCopy]],
    width_of: Mapping[int, int],
    tasks: Mapping[str, tuple[int, int, RunningState]],
    sizes: Mapping[str, int],
) -> tuple[EarlyBlocks, ...]:
    """Return the blocks of each rank's `early` copies that are still true.

    `width_of` has each rank's new group, `tasks` the (leader, attempt, state) of those that take
    part, `sizes` the number of blocks of each that do.
    """
    found: list[EarlyBlocks] = []
    for rank, copies in early.items():
        for each in copies:
            if each.task not in tasks or width_of.get(rank) != each.width:
                continue
            leader, attempt, state = tasks[each.task]
            now = leader, attempt, state.preemptions
            if now != (each.leader, each.attempt, each.preemptions):
                continue
            is_true = each.places < sizes[each.task]
            is_true[is_true] = state.blocks[each.places[is_true]] == each.blocks[is_true]
            if is_true.any():
                places, slots = each.places[is_true], each.slots[is_true]
                found.append(EarlyBlocks(each.task, rank, places, slots))
    return tuple(found)
