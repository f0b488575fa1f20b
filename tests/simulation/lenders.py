"""Ranks that read parts of the weights from each other: who lends, and whether that can be read.

Also how many pages each rank has: one that holds more layers whole has less memory for KV.
"""

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from comm_pool.layout import Group, Rank
from coordinator.model.weight_parts import WeightParts
from tests.simulation.checkers import check
from tests.simulation.faults import NARROWEST_OF_PARTS, Faults

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank
    from tests.simulation.world import World


def lent_parts(faults: Faults, seed: int) -> WeightParts:
    """Halves or quarters of the weights, over each four ranks."""
    count = (2, 4)[seed % 2]
    return WeightParts(count, NARROWEST_OF_PARTS, borrows=True, outlive=faults.shares_memory)


def draw_pages(seed: int, ranks: Iterable[Rank], fewest: int) -> dict[Rank, int]:
    """The pages of each rank, alike in every second world; a process keeps its predecessor's."""
    draw = random.Random(f"pages {seed}")
    most = draw.choice((0, 0, 2, 17))
    return {rank: fewest + draw.randint(0, most) for rank in ranks}


def check_loans(world: "World", process: "SimRank", group: Group) -> None:
    """Check that a step has all of the weights, and count what it borrows.

    A step reads each part from a member, or from memory that is there.

    A process has mapped the memory of its cohort. Where that ends with a process, all that share a
    copy end together, so a rank that steps has all of its lenders.
    """
    parts = world.settings.parts
    if not parts.borrows:
        return
    readable = [
        each
        for each in parts.sharing_with(group.leader)
        if world.cohorts[each] == process.cohort
        and (parts.outlive or world.ranks[each] is not None)
    ]
    lacking = parts.lacking(group, readable)
    check(lacking is None, f"rank {process.rank} steps in {group.name} without part {lacking}")
    if group.width < parts.width:
        world.stats.borrowed += 1
        world.stats.lent_by_the_dead += any(world.ranks[each] is None for each in readable)
