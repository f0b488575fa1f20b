"""What simulated ranks reach of each other: of those that start together, or that share memory."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from comm_pool.layout import Rank
from comm_pool.mixed import Staged
from comm_pool.plan import CommunicatorPlan
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.transfer.mailbox import RankMailbox
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_kv import FakeKV
from tests.simulation.lost_blocks import Content, KVOfRanks, Pieces
from tests.simulation.sim_engine import MAX_TASKS, STEP_TOKENS
from tests.simulation.sim_kv import GEOMETRY, GEOMETRY_OF_STAGES, SimKV
from tests.simulation.sim_queue import SharedQueue
from worker.engine import lost_kv
from worker.engine.lost_copies import ArrayPageCopies
from worker.engine.lost_kv import LostKV

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank

MAILBOX_BYTES = 1 << 17


class RankMemory(FakeCell):
    """Mailboxes, step queues, marks and KV of the ranks of one cohort."""

    def __init__(
        self,
        ranks: Collection[Rank],
        plan: CommunicatorPlan,
        num_pages: int,
        geometry: PageGeometry,
        pipelines: tuple[Staged, ...] = (),
        *,
        outlives: bool,
    ) -> None:
        """No rank has more than `num_pages`; `outlives`: the memory is of no process."""
        self.max_tasks, self.budget = MAX_TASKS, STEP_TOKENS
        self.num_pages = num_pages
        self.geometry = geometry
        self.ranks = tuple(sorted(ranks))
        self.aborted = set()
        self.memory: dict[int, FakeKV] = {}
        self.mailboxes: dict[Rank, RankMailbox] = {rank: SimMailbox() for rank in self.ranks}
        inside = [group for group in plan if set(group) <= set(ranks)]
        self._splits = {Split(1, width) for width in {1, *map(len, inside)}}
        self._splits |= {Split(each.pp, each.tp) for each in pipelines}
        self.shared_queues = {group: SharedQueue(group) for group in inside}
        self._pieces = Pieces() if outlives else None
        self.entered: dict[Content, int] = {}
        """Which stay has computed each entry of the directories."""
        self.lost: dict[Rank, LostKV] = {}
        """What the process of each rank reads of lost groups; none without such memory."""
        self._marks: dict[tuple[Rank, ...], dict[Rank, int]] = {group: {} for group in inside}

    def queue(self, ranks: tuple[Rank, ...]) -> SharedQueue:  # type: ignore[override]
        """Return the queue of a group."""
        return self.shared_queues[ranks]

    def marks_of(self, ranks: tuple[Rank, ...]) -> dict[Rank, int]:
        """Return the formation that each member of a group has aborted last."""
        return self._marks[ranks]

    def take(self, process: "SimRank", num_pages: int) -> None:
        """Give the place of a rank to a new process."""
        rank, mailbox = process.rank, self.mailboxes[process.rank]
        if self._pieces is not None:
            # The predecessor's KV can be read until then.
            self.lost[rank] = self._open(rank, self._pieces)
        if self._pieces is not None and rank in self.memory:
            inherited = lost_kv.inherited_pages(self.lost[rank].directories, rank)
            pages = self.memory[rank].words.reshape(self.geometry.num_layers, num_pages, -1)
            pages[:, np.setdiff1d(np.arange(num_pages), inherited)] = 0
        else:
            self.memory[rank] = SimKV(self.geometry, num_pages)
        assert isinstance(mailbox, SimMailbox)
        mailbox.note = partial(process.world.point, rank)

    def _open(self, rank: Rank, pieces: Pieces) -> LostKV:
        of_cell, pages = (rank, len(self.ranks)), self.num_pages
        geometry, splits = self.geometry, self._splits
        directories = lost_kv.open_directories(pieces, *of_cell, pages, geometry, splits)
        kv = KVOfRanks(self.memory, self.geometry.num_layers)
        return LostKV(directories, rank, ArrayPageCopies(self.geometry, rank, kv))

    def join(self, rank: Rank) -> None:
        """Let a new process take the place of one that has ended; the others look on."""
        self.mailboxes[rank].publish(0, b"")
        self.mailboxes[rank].expect_end(0)
        for group, queue in self.shared_queues.items():
            if rank in group:
                queue.skip(rank)
                self._marks[group].pop(rank, None)


class SimMailbox(RankMailbox):
    """A mailbox that only this process sees; it notes what its owner writes."""

    def __init__(self) -> None:
        memory: Any = bytearray(MAILBOX_BYTES)
        super().__init__(memory)
        self.note: Callable[[str], None] = lambda _: None

    def settle(self, message: bytes) -> None:
        """See `RankMailbox`, as all that follows."""
        super().settle(message)
        self.note("the last tokens are published")

    def finish_round(self, number: int) -> None:
        super().finish_round(number)
        self.note(f"round {number - 1} is finished")


@dataclass(frozen=True)
class Reach:
    """What a process finds when it starts."""

    cohort: int
    widths: tuple[int, ...]
    pipelines: tuple[Staged, ...]
    memory: RankMemory
    joins: bool
    together: dict[Rank, int]


class RankMemories:
    """The memory of the processes that were started last."""

    def __init__(
        self,
        world: int,
        plan: CommunicatorPlan,
        widths: tuple[int, ...],
        num_pages: int,
        pipelines: tuple[Staged, ...] = (),
        *,
        outlive: bool,
    ) -> None:
        """`outlive`: memory of all ranks is of no process; see `RankMemory`."""
        self._num_pages = num_pages
        self._pipelines = pipelines
        self._geometry = GEOMETRY_OF_STAGES if pipelines else GEOMETRY
        self._outlive = outlive
        self._world = world
        self._plan = plan
        self._widths = widths
        self._cohort = -1
        self._memory: RankMemory | None = None
        self.joined: set[tuple[Rank, int]] = set()
        """(rank, incarnation) of those that took a place among others that live."""

    def start(
        self, ranks: Collection[Rank], incarnations: dict[Rank, int], *, shares: bool
    ) -> Reach:
        """Let these start: with memory of their own, or all but the first in what is there."""
        together = {rank: incarnations[rank] for rank in ranks}
        if shares and len(ranks) < self._world:
            assert self._memory is not None
            for rank in ranks:
                self.joined.add((rank, incarnations[rank]))
                self._memory.join(rank)
            return self._reach(self._memory, together, self._world, joins=True)
        self._cohort += 1
        is_whole = len(ranks) == self._world
        outlives = self._outlive and is_whole
        sizes = self._num_pages, self._geometry, self._pipelines if is_whole else ()
        memory = RankMemory(ranks, self._plan, *sizes, outlives=outlives)
        if is_whole:
            self._memory = memory
        return self._reach(memory, together, len(ranks), joins=False)

    def _reach(
        self, memory: RankMemory, together: dict[Rank, int], world: int, *, joins: bool
    ) -> Reach:
        """Groups of up to `world` ranks can be formed."""
        widths = tuple(width for width in self._widths if width <= world)
        pipelines = tuple(each for each in self._pipelines if each.width <= world)
        return Reach(self._cohort, widths, pipelines, memory, joins, together)
