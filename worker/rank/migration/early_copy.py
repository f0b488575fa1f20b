"""What a rank has copied of running tasks before their groups were left, and if it is still true.

Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvadaptor.reshard.blocks import joined, pieces
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

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """What two copies have in common that are true for as long as each other."""
        return self.task, self.leader, self.attempt, self.preemptions, self.width

    def with_more(self, other: "EarlyCopy") -> "EarlyCopy":
        """Return the blocks of both, which have the same key."""
        return replace(
            self,
            places=np.concatenate((self.places, other.places)),
            blocks=np.concatenate((self.blocks, other.blocks)),
            slots=np.concatenate((self.slots, other.slots)),
        )


Packed = tuple[tuple[tuple[str, int, int, int, int], ...], list[int], Ints]
"""The keys and sizes of several copies, and (3, n): all places, blocks and slots."""


def packed(copies: Sequence[EarlyCopy]) -> Packed:
    """Pack copies into one array: several hundred small ones cost 10 ms at each end."""
    arrays = (
        joined(each.places for each in copies),
        joined(each.blocks for each in copies),
        joined(each.slots for each in copies),
    )
    keys = tuple(each.key for each in copies)
    return keys, [each.slots.size for each in copies], np.stack(arrays)


def unpacked(found: Packed) -> tuple[EarlyCopy, ...]:
    """Return the copies that `packed` packed."""
    keys, sizes, arrays = found
    rows = pieces(arrays, sizes)
    return tuple(EarlyCopy(*key, *own) for key, own in zip(keys, rows, strict=True))


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
