"""An engine in memory, for the rank's logic: it has tasks, pages and KV, but no model.

Its KV is real: each member writes its share of every token that a step computes, and a step fails
whose context is not there. So a migration that copies too little, or a lease that two tasks use,
shows as a failed step. By default a step is over when it was launched, as on CPU. With
`is_synchronous` off, launched steps wait, in order, until the test calls `FakeEngine.finish_steps`
or somebody asks for their tokens. `FakeCell` makes the engines of ranks that share queues,
mailboxes and KV.
"""

import mmap
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from comm_pool.formations import PeerLostError
from comm_pool.layout import Group, Mode, Rank, StepMode
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.group_directory import GroupDirectory
from kvadaptor.pages import PagePool
from kvadaptor.slot_table import SlotTable
from kvadaptor.transfer.mailbox import RankMailbox
from kvadaptor.transfer.move_stats import MoveStats
from kvadaptor.transfer.rounds import Finish, Round
from tests.harness.worker.fake_scheduler import (
    FakeIntake,
    FakeOutput,
    FakePlan,
    FakeScheduler,
    Part,
    token_at,
)
from worker.rank.engine import EngineFacts, EngineMover, NoRoomError
from worker.rank.step_times import StepCurve, StepTimes, width_times
from worker.spec import RankSpec

MAILBOX_BYTES = 1 << 20
PROBE = (-1.0, -2.0)
STEP_US = 500_000
"""Long beside what a test takes, so that the expected end of a step is not over yet."""


class FakeQueue:
    """One member's end of a group's step queue: what the leader sends, the others read."""

    def __init__(self, own: deque[bytes], others: list[deque[bytes]]) -> None:
        self._own = own
        self._others = others

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send to all others, as bytes: members share no object."""
        for each in self._others:
            each.append(pickle.dumps(obj))

    def dequeue(self, timeout: float | None = None) -> Any:
        """Return the next message; raises TimeoutError at once if there is none."""
        if not self._own:
            raise TimeoutError
        return pickle.loads(self._own.popleft())


class FakeCommunicators:
    """What all members know of their formations."""

    def __init__(self, aborted: set[tuple[tuple[Rank, ...], int]]) -> None:
        self.closed: tuple[tuple[Rank, ...], ...] = ()
        self.aborted = aborted

    def is_aborted(self, ranks: tuple[Rank, ...], formation: int) -> bool:
        """See `EngineCommunicators`."""
        return len(ranks) > 1 and (ranks, formation) in self.aborted

    def abort(self, ranks: tuple[Rank, ...], formation: int) -> None:
        """See `EngineCommunicators`."""
        self.aborted.add((ranks, formation))


class FakeKV:
    """A rank's KV memory: one word for each KV head of each token."""

    def __init__(self, geometry: PageGeometry, num_pages: int) -> None:
        self.geometry = geometry
        self.num_pages = num_pages
        size = num_pages * geometry.num_kv_heads * geometry.tokens_per_slot
        self.words: npt.NDArray[np.int64] = np.zeros(size, dtype=np.int64)

    def units(self, units: int) -> npt.NDArray[np.int64]:
        """Return the memory with a row for each of the `units` units of a page."""
        return self.words.reshape(self.num_pages * units, -1)

    def tokens(self, slots: list[int], width: int) -> npt.NDArray[np.int64]:
        """Return a copy, (tokens, heads), of what these slots hold, in the order of the slots."""
        shares = self.units(self.geometry.slots_per_page(width))
        heads = self.geometry.heads_per_rank(width)
        rows = shares[slots].reshape(len(slots), heads, -1)
        return rows.transpose(0, 2, 1).reshape(-1, heads)

    def write(self, slots: list[int], width: int, start: int, words: npt.NDArray[np.int64]) -> None:
        """Write (tokens, heads) words from token `start` on."""
        shares = self.units(self.geometry.slots_per_page(width))
        heads, per_slot = self.geometry.heads_per_rank(width), self.geometry.tokens_per_slot
        for number, word in enumerate(words, start):
            row = shares[slots[number // per_slot]].reshape(heads, per_slot)
            row[:, number % per_slot] = word


class FakeMover:
    """Copies between the memories of the ranks of a cell."""

    is_one_sided = True

    def __init__(self, own: int, memory: Mapping[int, FakeKV]) -> None:
        """Numbers ranks as `memory` does."""
        self._own = own
        self._memory = memory

    def start(
        self, copies: Round, finest: Split, launched: Callable[[], None] = lambda: None
    ) -> Finish:
        """Copy at once."""
        launched()
        units = finest.width
        target, moved = self._memory[self._own].units(units), [0, 0]
        for source, (src, dst) in copies.get(self._own, {}).items():
            target[dst] = self._memory[source].units(units)[src]
            moved[source == self._own] += src.size * target[0].nbytes
        return lambda: MoveStats(moved[0], moved[1], 0.0)


class FakeProbe:
    """A probe whose values the test chooses; it says how often each mode was computed."""

    error_max_nats = 0.1

    def __init__(self) -> None:
        self.values = PROBE
        self.computed: list[StepMode] = []

    def run(self, execute: Callable[[Any], Any], mode: StepMode) -> tuple[float, ...]:
        """Let all members compute an empty step."""
        self.computed.append(mode)
        execute(FakePlan((), frozenset(), 0, mode))
        return self.values


class LaunchedStep:
    """A step in flight: a handle such as vLLM's asynchronous output."""

    def __init__(self, engine: "FakeEngine", compute: Callable[[], dict[str, int]]) -> None:
        self._engine = engine
        self._compute = compute
        self._tokens: dict[str, int] = {}
        self.is_over = False
        self.copy_event = self

    def query(self) -> bool:
        """Whether its tokens are there."""
        return self.is_over

    def get_output(self) -> dict[str, int]:
        """Wait for its tokens, and so for all steps that were launched before it."""
        while not self.is_over:
            self._engine.finish_step()
        return self._tokens

    def run(self) -> None:
        """Compute it."""
        self._tokens, self.is_over = self._compute(), True


@dataclass
class FakeMode:
    """See `EngineMode`."""

    engine: "FakeEngine"
    ranks: tuple[Rank, ...]
    scheduler: FakeScheduler | None
    table: SlotTable | None
    queue: FakeQueue
    times: StepTimes

    def __post_init__(self) -> None:
        self.known: set[str] = set()
        """Tasks of which the runner has state."""
        self.computed = 0
        """How many steps were computed."""

    @property
    def width(self) -> int:
        """See `EngineMode`, as all that follows."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        return 1

    @property
    def directory(self) -> GroupDirectory | None:
        return self.engine.directories.get(self.ranks)

    @property
    def is_leader(self) -> bool:
        return self.ranks[0] == self.engine.spec.rank

    def plan_step(self, group: Group, settle: Callable[[], None]) -> FakePlan:
        assert self.scheduler is not None
        plan = self.scheduler.plan_step()
        mode = Mode.TP if group.mode is Mode.SHIFT else group.mode
        plan.mode = group.mixed or mode if mode is Mode.SP else mode
        return plan

    def execute(self, plan: FakePlan) -> Any:
        run = self.ready(plan)
        if self.engine.is_synchronous:
            return run()
        self._check_selected()
        slots = self._slots(plan)  # Those of now: it is computed later.
        launched = LaunchedStep(self.engine, lambda: self._compute(plan, slots))
        self.engine.launched.append(launched)
        return launched

    def ready(self, plan: FakePlan) -> Callable[[], dict[str, int]]:
        slots = self._slots(plan)

        def run() -> dict[str, int]:
            self._check_selected()
            if self.engine.communicators.is_aborted(self.ranks, self.engine.formation):
                raise PeerLostError(self.engine.formation)
            if self.engine.has_no_room:
                raise NoRoomError("the test says so.")
            return self._compute(plan, slots)

        return run

    def finish_step(self, plan: FakePlan, result: Mapping[str, int]) -> list[FakeOutput]:
        assert self.scheduler is not None
        return self.scheduler.finish_step(plan, result)

    def forget_steps(self) -> None:
        self.known.clear()
        if self.scheduler is not None:
            self.scheduler.forget_steps()

    def _check_selected(self) -> None:
        assert self.engine.selected is self, "a step of a width that is not selected."

    def _slots(self, plan: FakePlan) -> list[list[int]]:
        blocks = [list(part.blocks) for part in plan.parts]
        return blocks if self.table is None else [self.table.slots(each) for each in blocks]

    def _compute(self, plan: FakePlan, slots: list[list[int]]) -> dict[str, int]:
        """Read the context of each task, write its new tokens, and give the next one."""
        self.computed += 1
        self.known -= plan.ended
        for part, at in zip(plan.parts, slots, strict=True):
            words = self._words(part)
            found = self.engine.kv.tokens(at, self.width)[: part.start]
            assert (found == words[: part.start]).all(), f"the KV of {part.name} is not there."
            self.engine.kv.write(at, self.width, part.start, words[part.start :])
            self.known.add(part.name)
        return {
            part.name: token_at(part.prompt, part.start + part.count)
            for part in plan.parts
            if part.gives
        }

    def _words(self, part: Part) -> npt.NDArray[np.int64]:
        """Return this member's share, (tokens, heads), of the KV of a task after its step."""
        heads = self.engine.kv.geometry.heads_per_rank(self.width)
        first = self.ranks.index(self.engine.spec.rank) * heads
        key = zlib.crc32(str(part.prompt).encode()) + 1
        positions = np.arange(part.start + part.count)[:, None]
        words: npt.NDArray[np.int64] = key * 10_000 + positions * 16 + first + np.arange(heads)
        return words


class FakeEngine:
    """See `Engine`; made by `FakeCell`."""

    holds_steps = True

    def __init__(self, cell: "FakeCell", spec: RankSpec) -> None:
        self.spec = spec
        self.cell = cell
        self.is_synchronous = True
        self.has_no_room = False
        """Whether steps fail for want of device memory."""
        self.whole_layers: int | None = None
        self.directories: dict[tuple[Rank, ...], GroupDirectory] = {}
        """The block directories of its groups, where a test wants them."""
        self.present: dict[Rank, int] = {}
        """The processes that it knows of."""
        self.kv = cell.memory[spec.rank]
        self.pages = PagePool(self.kv.num_pages)
        self.mailboxes = cell.mailboxes
        self.mover: EngineMover = FakeMover(spec.rank, cell.memory)
        self.intake = FakeIntake()
        self.communicators = FakeCommunicators(cell.aborted)
        self.modes = {width: self._mode(width) for width in spec.widths}
        self.probe = FakeProbe()
        self.probed: dict[tuple[int, StepMode], tuple[tuple[float, ...], int]] = {
            (width, Mode.DP if width == 1 else Mode.TP): (PROBE, 7) for width in spec.widths
        }
        self.selected: FakeMode | None = None
        self.formation = 0
        self.launched: deque[LaunchedStep] = deque()
        self.met: list[int] = []
        """The widths in which the members have met, in order."""

    def _mode(self, width: int) -> FakeMode:
        first = self.spec.rank // width * width
        ranks = tuple(map(Rank, range(first, first + width)))
        slots = self.kv.geometry.slots_per_page(width)
        scheduler = None
        if ranks[0] == self.spec.rank:
            tokens = self.kv.geometry.tokens_per_slot
            scheduler = FakeScheduler(slots, tokens, self.cell.max_tasks, self.cell.budget)
        table = SlotTable(self.kv.num_pages, slots) if width > 1 else None
        curve: dict[StepMode, StepCurve] = {
            Mode.DP if width == 1 else Mode.TP: StepCurve(((1, STEP_US),))
        }
        queue = self.cell.queue(ranks, self.spec.rank)
        return FakeMode(self, ranks, scheduler, table, queue, StepTimes(width, curve))

    def know(self, present: Mapping[Rank, int]) -> None:
        self.present = dict(present)

    def facts(self) -> EngineFacts:
        """See `Engine`, as all that follows."""
        return EngineFacts(
            device="fake",
            max_tasks=self.cell.max_tasks,
            max_model_len_tokens=self.cell.budget,
            tokens_per_step_max=self.cell.budget,
            memory=(("kv", self.kv.words.nbytes),),
            step_times=tuple(width_times(mode.times) for mode in self.modes.values()),
            whole_layers=self.whole_layers,
        )

    def gauges(self) -> tuple[tuple[str, int], ...]:
        led = (mode.scheduler for mode in self.modes.values() if mode.scheduler is not None)
        return (("preemptions", sum(each.preemptions for each in led)),)

    def of_width(self, width: int, stages: int = 1) -> FakeMode:
        assert stages == 1, "fake engines have no pipeline groups."
        return self.modes[width]

    def select(self, width: int, formation: int = 0, stages: int = 1) -> FakeMode:
        self.selected, self.formation = self.modes[width], formation
        return self.selected

    def done(self) -> Callable[[], bool]:
        launched = list(self.launched)
        return lambda: all(each.is_over for each in launched)

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def meet(self, width: int) -> None:
        self.met.append(width)

    def copy_aside(self) -> None:
        """Copies are made at once."""

    # ------------------------------------------------------------------ for tests

    def finish_step(self) -> None:
        """Let the oldest launched step be computed."""
        self.launched.popleft().run()

    def finish_steps(self) -> None:
        """Let all launched steps be computed."""
        while self.launched:
            self.finish_step()


class FakeCell:
    """The engines of a few ranks, made when they are asked for."""

    def __init__(
        self,
        world: int = 1,
        *,
        pages: int | Sequence[int] = 33,
        tokens_per_slot: int = 32,
        max_tasks: int = 8,
        budget: int = 96,
    ) -> None:
        """Groups may have all widths up to `world`, a power of two; `budget` tokens make a step.

        Each rank has as many `pages`, or as many as stand in its place.
        """
        self.max_tasks = max_tasks
        self.budget = budget
        self.widths = tuple(1 << power for power in range(world.bit_length()))
        self.aborted: set[tuple[tuple[Rank, ...], int]] = set()
        geometry = PageGeometry(1, 4, 1, 1, 4, tokens_per_slot)
        everyone = tuple(map(Rank, range(world)))
        sizes = [pages] * world if isinstance(pages, int) else pages
        self.memory: dict[int, FakeKV] = {
            rank: FakeKV(geometry, size) for rank, size in zip(everyone, sizes, strict=True)
        }
        self.mailboxes = {rank: RankMailbox(mmap.mmap(-1, MAILBOX_BYTES)) for rank in everyone}
        self._queues: dict[tuple[Rank, ...], dict[Rank, deque[bytes]]] = {}
        self.engines = {rank: FakeEngine(self, self._spec(rank, world)) for rank in everyone}

    def _spec(self, rank: Rank, world: int) -> RankSpec:
        together = dict.fromkeys(map(Rank, range(world)), 1)
        return RankSpec(
            rank, Rank(0), world, self.widths, self.widths[-1], "", 1, together=together
        )

    def queue(self, ranks: tuple[Rank, ...], rank: Rank) -> FakeQueue:
        """Return a member's end of a group's queue."""
        ends = self._queues.setdefault(ranks, {each: deque() for each in ranks})
        return FakeQueue(ends[rank], [end for each, end in ends.items() if each != rank])


def fake_engine(rank: int = 0, world: int = 1, **sizes: int) -> FakeEngine:
    """One rank's engine of a cell of its own; see `FakeCell`."""
    return FakeCell(world, **sizes).engines[Rank(rank)]
