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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from comm_pool.formations import PeerLostError
from comm_pool.layout import Group, Mode, Rank, StepMode, lease_key
from comm_pool.mixed import Staged
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.group_directory import GroupDirectory
from kvadaptor.pages import PagePool
from kvadaptor.slot_table import SlotTable
from kvadaptor.transfer.mailbox import RankMailbox
from tests.harness.worker.fake_kv import LAYERS, FakeKV, FakeMover, Words
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
    stages: int = 1

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
    def split(self) -> Split:
        """How the members divide the KV of their tasks."""
        return Split(self.stages, self.width // self.stages)

    @property
    def directory(self) -> GroupDirectory | None:
        return self.engine.directories.get(lease_key(self.ranks, self.stages))

    @property
    def is_leader(self) -> bool:
        return self.ranks[0] == self.engine.spec.rank

    def inherit(self) -> None:
        """It caches nothing that its tasks could hit."""

    def plan_step(self, group: Group, settle: Callable[[], None]) -> FakePlan:
        assert self.scheduler is not None
        plan = self.scheduler.plan_step()
        if self.stages > 1:
            (plan.mode,) = group.step_modes
            return plan
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
            found = self.engine.kv.tokens(at, self.split)[: part.start]
            assert (found == words[: part.start]).all(), f"the KV of {part.name} is not there."
            self.engine.kv.write(at, self.split, part.start, words[part.start :])
            self.known.add(part.name)
        return {
            part.name: token_at(part.prompt, part.start + part.count)
            for part in plan.parts
            if part.gives
        }

    def _words(self, part: Part) -> Words:
        """Return this member's share, (tokens, layers, heads), of a task's KV after its step."""
        slots = self.engine.kv.geometry.slots(self.split)
        share = self.split.share_of(self.ranks.index(self.engine.spec.rank))
        # More members than heads share those of a column.
        row, column = divmod(share, self.split.tp)
        column = column * slots.columns // self.split.tp
        layers = np.arange(row * slots.layers, (row + 1) * slots.layers)[:, None]
        heads = np.arange(column * slots.heads, (column + 1) * slots.heads)
        key = zlib.crc32(str(part.prompt).encode()) + 1
        positions = np.arange(part.start + part.count)[:, None, None]
        words: Words = ((key * 10_000 + positions) * LAYERS + layers) * 16 + heads
        return words


def times_of(width: int, staged: Staged | None, step_us: int) -> StepTimes:
    """Return times that say that steps of any size take so long."""
    mode: StepMode = staged or (Mode.DP if width == 1 else Mode.TP)
    return StepTimes(width, {mode: StepCurve(((1, step_us),))})


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
        """The block directories of its groups, by their leases' keys, where a test wants them."""
        self.present: dict[Rank, int] = {}
        """The processes that it knows of."""
        self.kv = cell.memory[spec.rank]
        self.pages = PagePool(self.kv.num_pages)
        self.mailboxes = cell.mailboxes
        self.mover: EngineMover = FakeMover(spec.rank, cell.memory)
        self.intake = FakeIntake()
        self.communicators = FakeCommunicators(cell.aborted)
        self.modes: dict[int | Staged, FakeMode] = {
            width: self._mode(width) for width in spec.widths
        }
        self.modes |= {each: self._mode(each.width, each) for each in spec.pipelines}
        self.probe = FakeProbe()
        self.probed: dict[tuple[int, StepMode], tuple[tuple[float, ...], int]] = {
            (mode.width, each): (PROBE, 7)
            for mode in self.modes.values()
            for each in mode.times.curves
        }
        self.selected: FakeMode | None = None
        self.formation = 0
        self.launched: deque[LaunchedStep] = deque()
        self.met: list[int] = []
        """The widths in which the members have met, in order."""

    def _mode(self, width: int, staged: Staged | None = None) -> FakeMode:
        """Make the objects of groups of a width; of pipeline groups if they are `staged`."""
        first = self.spec.rank // width * width
        ranks = tuple(map(Rank, range(first, first + width)))
        stages = staged.pp if staged is not None else 1
        page = self.kv.geometry.slots(Split(stages, width // stages))
        scheduler = None
        if ranks[0] == self.spec.rank:
            tokens = self.kv.geometry.tokens_per_slot
            scheduler = FakeScheduler(
                *(page.count, tokens, self.cell.max_tasks, self.cell.budget),
                stages=stages,
                is_on_device=lambda: not self.is_synchronous,
            )
        table = SlotTable(self.kv.num_pages, page.count, page) if width > 1 else None
        queue = self.cell.queue(ranks, self.spec.rank)
        times = times_of(width, staged, STEP_US)
        return FakeMode(self, ranks, scheduler, table, queue, times, stages)

    def order_copies(self) -> None:
        """No copy goes beside steps."""

    def give_host_pages(self) -> None:
        """It has none."""

    def stop_copies(self) -> None:
        """No copy goes beside steps."""

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
            step_times=tuple(map(width_times, self._times())),
            whole_layers=self.whole_layers,
        )

    def _times(self) -> Iterable[StepTimes]:
        """Return one for each width, with those of its pipeline groups."""
        found: dict[int, StepTimes] = {}
        for mode in self.modes.values():
            known = found.get(mode.width)
            found[mode.width] = mode.times if known is None else known.plus(mode.times)
        return found.values()

    def gauges(self) -> tuple[tuple[str, int], ...]:
        led = (mode.scheduler for mode in self.modes.values() if mode.scheduler is not None)
        return (("preemptions", sum(each.preemptions for each in led)),)

    def of_width(self, width: int, stages: int = 1) -> FakeMode:
        return self.modes[Staged(stages, width // stages) if stages > 1 else width]

    def select(self, width: int, formation: int = 0, stages: int = 1) -> FakeMode:
        self.selected, self.formation = self.of_width(width, stages), formation
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
        pipelines: Sequence[Staged] = (),
    ) -> None:
        """Groups may have all widths up to `world`, a power of two; `budget` tokens make a step.

        Each rank has as many `pages`, or as many as stand in its place. `pipelines` are the
        pipeline groups that may be formed.
        """
        self.max_tasks = max_tasks
        self.budget = budget
        self.widths = tuple(1 << power for power in range(world.bit_length()))
        self.aborted: set[tuple[tuple[Rank, ...], int]] = set()
        self.pipelines = tuple(each for each in pipelines if each.width <= world)
        geometry = PageGeometry(LAYERS, 4, 1, 1, 4, tokens_per_slot)
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
            *(rank, Rank(0), world, self.widths, self.widths[-1], "", 1),
            pipelines=self.pipelines,
            together=together,
        )

    def queue(self, ranks: tuple[Rank, ...], rank: Rank) -> FakeQueue:
        """Return a member's end of a group's queue."""
        ends = self._queues.setdefault(ranks, {each: deque() for each in ranks})
        return FakeQueue(ends[rank], [end for each, end in ends.items() if each != rank])


def fake_engine(rank: int = 0, world: int = 1, **sizes: Any) -> FakeEngine:
    """One rank's engine of a cell of its own; see `FakeCell`."""
    return FakeCell(world, **sizes).engines[Rank(rank)]
