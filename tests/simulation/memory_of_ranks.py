"""What ranks reach of each other: boards and step queues, of those that start together or share."""

from collections.abc import Collection
from dataclasses import dataclass

from comm_pool.layout import Rank
from comm_pool.plan import CommunicatorPlan
from tests.simulation.sim_moving import Board
from tests.simulation.stepping import StepQueue


@dataclass(frozen=True)
class Reach:
    """What a process finds when it starts."""

    cohort: int
    widths: tuple[int, ...]
    mailboxes: dict[Rank, Board]


class MemoryOfRanks:
    """The boards and queues of the processes that were started last."""

    def __init__(self, world: int, plan: CommunicatorPlan, widths: tuple[int, ...]) -> None:
        self._world = world
        self._plan = plan
        self._widths = widths
        self._cohort = -1
        self.mailboxes: dict[Rank, Board] = {}
        self._queues: dict[tuple[Rank, ...], StepQueue] = {}
        self._followed: dict[Rank, list[StepQueue]] = {}
        self.joined: set[tuple[Rank, int]] = set()
        """(rank, incarnation) of those that took a place among others that live."""

    def start(
        self, ranks: Collection[Rank], incarnations: dict[Rank, int], *, shares: bool
    ) -> Reach:
        """Let these start: with memory of their own, or all but the first in what is there."""
        if shares and len(ranks) < self._world:
            self._join(ranks, incarnations)
            return Reach(self._cohort, self._widths, self.mailboxes)
        self._cohort += 1
        mailboxes = {rank: Board(owner=incarnations[rank]) for rank in ranks}
        inside = [group for group in self._plan if set(group) <= set(ranks)]
        self._queues |= {group: StepQueue(group) for group in inside}
        for rank in ranks:
            self._followed[rank] = [self._queues[group] for group in inside if rank in group[1:]]
        if len(ranks) == self._world:
            self.mailboxes = mailboxes
        widths = tuple(width for width in self._widths if width <= len(ranks))
        return Reach(self._cohort, widths, mailboxes)

    def _join(self, ranks: Collection[Rank], incarnations: dict[Rank, int]) -> None:
        for rank in ranks:
            self.joined.add((rank, incarnations[rank]))
            # Those that live go on looking at the same board.
            vars(self.mailboxes[rank]).update(vars(Board(owner=incarnations[rank])))
            for queue in self._followed[rank]:
                queue.skip(rank)

    def queue(self, ranks: tuple[Rank, ...]) -> StepQueue:
        """The queue of a group."""
        return self._queues[ranks]

    def queues_of(self, rank: Rank) -> list[StepQueue]:
        """Those that the rank follows."""
        return self._followed[rank]
