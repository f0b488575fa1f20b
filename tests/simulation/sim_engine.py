"""The engine of a simulated rank: the fake one, with collectives that wait, fail and hang.

On CPU a step waits for all members where it is run, and raises once its formation is aborted. With
`is_synchronous` off it is launched on a device, which runs what it is given in order, whatever the
process does meanwhile. A step there that lacks a member never ends, until it is unblocked.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from comm_pool import layout
from comm_pool.formations import Formations, PeerLostError
from comm_pool.layout import Group, Rank, StepMode
from comm_pool.mixed import Staged
from kvadaptor.geometry import Split
from kvadaptor.slot_table import SlotTable
from tests.harness.worker.fake_engine import (
    PROBE,
    FakeCommunicators,
    FakeEngine,
    FakeMode,
    FakeProbe,
    FakeQueue,
    LaunchedStep,
    times_of,
)
from tests.harness.worker.fake_kv import Words
from tests.harness.worker.fake_scheduler import FakeOutput, FakePlan
from tests.simulation.checkers import Violation, check
from tests.simulation.lost_blocks import Doubt, GroupBlocks, Loads
from tests.simulation.sim_kv import (
    BLOCK_TOKENS,
    KV_HEADS,
    Copy,
    SimMover,
    Stay,
    is_full_block_of,
    words_of,
)
from tests.simulation.sim_queue import SimQueue
from tests.simulation.sim_scheduler import SimIntake, SimPlan, SimScheduler
from worker.engine.lost_kv import PLACES, LostKV
from worker.rank.engine import EngineFacts, NoRoomError
from worker.spec import RankSpec

if TYPE_CHECKING:
    from tests.simulation.open_steps import OpenStep
    from tests.simulation.rank_memory import RankMemory
    from tests.simulation.sim_rank import SimRank

MAX_TASKS = 8
STEP_TOKENS = 64
STEP_US = 10_000
WRONG_PROBE = (-9.0, -9.0)
VOID = -1
"""The token of a step that never ended."""


@dataclass
class Planes:
    """Where the members of a group mark a formation as aborted, in memory that all of them see."""

    marks: dict[Rank, int]


class SimCommunicators(FakeCommunicators):
    """See `EngineCommunicators`; marks are shared on CPU, and each process' own elsewhere."""

    def __init__(self, process: "SimRank", memory: "RankMemory", *, is_shared: bool) -> None:
        self.closed: tuple[tuple[Rank, ...], ...] = ()
        self._process = process
        self._memory = memory
        self._is_shared = is_shared
        self._own = Formations()

    def is_aborted(self, ranks: tuple[Rank, ...], formation: int) -> bool:
        """See `EngineCommunicators`, as all that follows."""
        if len(ranks) == 1:
            return False
        is_marked = self._is_shared and formation in self._memory.marks_of(ranks).values()
        return is_marked or self._own.is_aborted(formation)

    def abort(self, ranks: tuple[Rank, ...], formation: int) -> None:
        self._own.abort(formation)
        if self._is_shared and len(ranks) > 1:
            self._memory.marks_of(ranks)[self._process.rank] = formation

    def unblock(self, ranks: tuple[Rank, ...], is_wanted: Callable[[], bool]) -> None:
        """See `watchdog.Communicators`; it fails where nothing can end a collective."""
        process = self._process
        if self._is_shared or not is_wanted():
            return
        if ranks not in self.closed:
            self.closed = (*self.closed, ranks)
            process.world.stats.closed += 1
        if process.world.faults.drains:
            process.engine.unblock(ranks)


class SimProbe(FakeProbe):
    """The probe of the numerical guard; `Drift` says what it finds."""

    def __init__(self, engine: "SimEngine") -> None:
        super().__init__()
        self._engine = engine

    def run(self, execute: Callable[[Any], Any], mode: StepMode) -> tuple[float, ...]:
        """See `EngineProbe`."""
        plan = SimPlan((), frozenset(), 0, mode)
        process = self._engine.process
        result = execute(self._engine.stamped(plan))
        if isinstance(result, LaunchedStep):
            result.get_output()
        assert self._engine.selected is not None
        is_wrong = process.world.drift.is_wrong(process.world, self._engine.selected.ranks)
        return WRONG_PROBE if is_wrong else PROBE


class DeviceStep(LaunchedStep):
    """A step, or a meeting, that a device has been given."""

    def __init__(
        self, engine: "SimEngine", step: "OpenStep", compute: Callable[[], dict[str, int]]
    ) -> None:
        super().__init__(engine, compute)
        self.step = step
        self._process = engine.process
        self.barriers: list[Copy] = list(engine.barriers)

    def get_output(self) -> dict[str, int]:
        """Wait for its tokens."""
        if not self.is_over:
            self._process.host.wait(lambda: self.is_over)
        return self._tokens

    def void(self) -> None:
        """Let it be over without having computed anything."""
        self._tokens = dict.fromkeys((part.name for part in self.step.plan.parts), VOID)
        self.is_over = True


@dataclass
class SimMode(FakeMode):
    """See `EngineMode`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kv, split = self.engine.kv, self.split
        slots = kv.geometry.slots(split)
        row, column = divmod(split.share_of(self.ranks.index(self.engine.spec.rank)), split.tp)
        layers = np.arange(row * slots.layers, (row + 1) * slots.layers)[:, None]
        heads = np.arange(column * slots.heads, (column + 1) * slots.heads)
        self._shares: Words = (layers * KV_HEADS + heads).reshape(-1)
        self._blocks = kv.blocks(split)[:, :, 0]
        self._regions = kv.regions(split)
        self._checked: set[int] = set()
        """Stays whose KV was found or made since the width was selected."""

    @property
    def _sim(self) -> "SimEngine":
        assert isinstance(self.engine, SimEngine)
        return self.engine

    def plan_step(self, group: Group, settle: Callable[[], None]) -> FakePlan:
        plan = super().plan_step(group, settle)
        assert isinstance(plan, SimPlan)
        self._count(plan.loads)
        return self._sim.stamped(plan)

    def inherit(self) -> None:
        """Read what its tasks could hit, as another process has left it."""
        blocks = self.scheduler.blocks if isinstance(self.scheduler, SimScheduler) else None
        for block, stay in blocks.take_inherited() if blocks is not None else ():
            found = self._blocks[self._places([block])].reshape(-1)
            what = f"rank {self._sim.process.rank} inherits {found.tolist()}, not of stay {stay}"
            check(is_full_block_of(stay, found, self._shares), what)
            self._sim.process.world.stats.inherited += 1

    def _count(self, loads: Loads) -> None:
        """Count what a step that was just planned loads."""
        world, lost = self._sim.process.world, self._sim.lost
        if lost is None:
            return
        for place in loads.lost_places:
            shape = lost.directories[place // PLACES].shape
            ranks = shape.ranks
            world.stats.loaded += 1
            world.stats.loaded_of_wide += len(ranks) > 1
            world.stats.loaded_of_stages += shape.stages > 1
            world.stats.loaded_in_stages += self.stages > 1
            world.stats.loaded_of_the_dead += any(world.ranks[Rank(each)] is None for each in ranks)

    def select(self) -> None:
        """Trust no KV that was found before."""
        self._checked.clear()

    def execute(self, plan: FakePlan) -> Any:
        engine = self._sim
        if engine.is_synchronous:
            return self.ready(plan)()
        engine.raise_if_without_room()
        self._check_selected()
        slots = self._slots(plan)  # Those of now: it is computed later.
        step = engine.process.world.steps.begin(engine.process, plan)
        launched = DeviceStep(engine, step, lambda: self._compute(plan, slots))
        engine.launch(launched)
        return launched

    def ready(self, plan: FakePlan) -> Callable[[], dict[str, int]]:
        engine, slots = self._sim, self._slots(plan)
        step = engine.process.world.steps.begin(engine.process, plan)
        formation = engine.formation
        load = self._loader(plan)

        def run() -> dict[str, int]:
            self._check_selected()
            assert engine.formation == formation, "a deferred step of another formation."
            engine.raise_if_without_room()
            load()
            engine.meet_in(step, lambda: self._compute(plan, slots))
            return step.tokens

        return run

    def finish_step(self, plan: FakePlan, result: Mapping[str, int]) -> list[FakeOutput]:
        outputs = super().finish_step(plan, result)
        assert isinstance(plan, SimPlan)
        self._sim.process.world.stats.void += len(plan.loads.void)
        return outputs

    def _loader(self, plan: FakePlan) -> Callable[[], None]:
        """Return a call that loads what a step loads of lost groups, as the product does."""
        assert isinstance(plan, SimPlan)
        engine, loads = self._sim, plan.loads
        if engine.lost is None or not loads.tasks:
            return lambda: None
        member = self.ranks.index(engine.spec.rank)
        return engine.lost.loader(loads, self.split, member, self.table)

    def _compute(self, plan: FakePlan, slots: list[list[int]]) -> dict[str, int]:
        """Read the context of each task, and write its new tokens."""
        assert isinstance(plan, SimPlan) and plan.step is not None
        if self._sim.process.is_replaced:
            return {}  # It was in the step when it ended, and its pages are another's by now.
        self.computed += 1
        self.known -= plan.ended
        checked = self._checked
        for part, at in zip(plan.parts, slots, strict=True):
            stay, start, end = plan.stays[part.name], part.start, part.start + part.count
            first = start // BLOCK_TOKENS
            is_loaded = part.name in plan.loads.tasks
            checks_from = first if stay.number in checked and not is_loaded else 0
            found = self._wrong(at, stay, checks_from, -(-start // BLOCK_TOKENS), start)
            for block, what in found:
                if not is_loaded:
                    raise Violation(what)
                plan.loads.doubts.append(Doubt(part.blocks[block], what))
            last = -(-end // BLOCK_TOKENS)
            shape = last - first, len(self._regions), -1
            words = words_of(stay, first, last, end, self._shares).reshape(shape)
            self._blocks[self._places(at[first:last])] = words
            checked.add(stay.number)
            self.known.add(part.name)
        return plan.step.tokens

    def _places(self, slots: list[int]) -> Words:
        """Return (slots, layers): where these lie in each layer of this member."""
        places: Words = np.array(slots, dtype=np.int64)[:, None] + self._regions
        return places

    def _wrong(
        self, slots: list[int], stay: Stay, first: int, last: int, tokens: int
    ) -> Iterator[tuple[int, str]]:
        """Yield the blocks from `first` to `last` that hold something else, and what."""
        if first == last:
            return
        found = self._blocks[self._places(slots[first:last])].reshape(last - first, -1)
        wanted = words_of(stay, first, last, tokens, self._shares)
        if (found == wanted).all():
            return
        rank = self._sim.process.rank
        what = f"rank {rank} has {found.tolist()} in {self.ranks}, not {wanted.tolist()}"
        for number in np.flatnonzero((found != wanted).any(axis=1)).tolist():
            yield first + number, what


class SimEngine(FakeEngine):
    """See `Engine`."""

    selected: SimMode | None

    def __init__(
        self, process: "SimRank", memory: "RankMemory", spec: RankSpec, *, on_device: bool
    ) -> None:
        """`on_device`: steps run on a device beside the process."""
        self.process = process
        self._memory = memory
        self.lacks_room = False
        """Whether the next step finds no room on the device."""
        self.copies: list[Copy] = []
        """Those that are in flight."""
        self.barriers: list[Copy] = []
        """Copies that later launches wait for."""
        self.lost = memory.lost.get(spec.rank)
        """The KV of lost groups; None where it ends with its processes."""
        super().__init__(memory, spec)
        if self.lost is not None:
            for mode in self.modes.values():
                self._enter_blocks(mode, self.lost)
        self.is_synchronous = self.holds_steps = not on_device
        self.intake: SimIntake = SimIntake()
        self.mover: SimMover = SimMover(process)
        self.probe: SimProbe = SimProbe(self)
        self.communicators: SimCommunicators = SimCommunicators(
            process, memory, is_shared=not on_device
        )

    def _mode(self, width: int, staged: Staged | None = None) -> SimMode:
        first = self.spec.rank // width * width
        ranks = tuple(map(Rank, range(first, first + width)))
        stages = staged.pp if staged is not None else 1
        page = self.kv.geometry.slots(Split(stages, width // stages))
        scheduler = None
        if ranks[0] == self.spec.rank:
            scheduler = SimScheduler(
                page.count, BLOCK_TOKENS, MAX_TASKS, STEP_TOKENS, stages=stages
            )
            scheduler.stays = self.process.world.stays
        # Directories are as large on all ranks; where layers lie depends on this rank's memory.
        num_pages = self.kv.num_pages if staged is not None else self._memory.num_pages
        table = SlotTable(num_pages, page.count, page) if width > 1 else None
        queue: FakeQueue = SimQueue(self.process, self._memory.queue(ranks)) if width > 1 else NONE
        times = times_of(width, staged, STEP_US)
        return SimMode(self, ranks, scheduler, table, queue, times, stages)

    def _enter_blocks(self, mode: FakeMode, lost: LostKV) -> None:
        """Let a scheduler enter its full blocks, and load those of lost groups."""
        key = layout.lease_key(mode.ranks, mode.stages)
        directory = lost.directory_of(key)
        assert directory is not None
        self.directories[key] = directory
        if isinstance(mode.scheduler, SimScheduler):
            mode.scheduler.blocks = GroupBlocks(directory, lost, self._memory.entered)

    def know(self, present: Mapping[Rank, int]) -> None:
        super().know(present)
        if self.lost is not None:
            self.lost.know(present)

    def facts(self) -> EngineFacts:
        """See `Engine`, as all that follows."""
        facts = super().facts()
        return replace(
            facts,
            device="sim",
            max_tasks=MAX_TASKS,
            max_model_len_tokens=STEP_TOKENS,
            tokens_per_step_max=STEP_TOKENS,
            inherits=self.lost is not None and self.lost.inherits,
            step_times=facts.step_times if self.spec.pipelines else (),
        )

    def select(self, width: int, formation: int = 0, stages: int = 1) -> SimMode:
        mode = super().select(width, formation, stages)
        assert isinstance(mode, SimMode)
        mode.select()
        return mode

    def mark(self) -> Callable[[], None]:
        if self.is_synchronous:
            return lambda: None
        given = list(self.copies)
        return lambda: self.barriers.extend(given)

    def meet(self, width: int) -> None:
        ranks = self.of_width(width).ranks
        step = self.process.world.steps.meeting(self.process, ranks, self.formation)
        if self.is_synchronous:
            self.meet_in(step)
        else:
            self.launch(DeviceStep(self, step, dict))

    # ------------------------------------------------------------------ steps

    def stamped(self, plan: SimPlan) -> SimPlan:
        """Note in a plan from which formation it comes, and over which lease."""
        plan.binding = self.process.participant.binding
        plan.table = self.table_of()
        return plan

    def table_of(self) -> frozenset[int]:
        """Return the lease indices of the selected group; none in dp."""
        assert self.selected is not None
        mode = self.selected
        if mode.width == 1:
            return frozenset()
        key = layout.lease_key(mode.ranks, mode.stages)
        return frozenset(self.pages.lease_indices(key).tolist())

    def raise_if_without_room(self) -> None:
        """Raise, once, if the simulation wants a step to find no room."""
        if self.lacks_room:
            self.lacks_room = False
            self.process.world.stats.without_room += 1
            self.process.had_no_room_in.add(self.formation)
            raise NoRoomError("the simulation says so.")

    def meet_in(self, step: "OpenStep", compute: Callable[[], Any] = dict) -> None:
        """Compute in a step with the others, and wait for what its own share of it waits for."""
        rank, ranks = self.process.rank, step.ranks
        step.arrive(rank, compute)

        def is_lost() -> bool:
            return self.communicators.is_aborted(ranks, step.formation)

        if not (step.has_passed(rank) or is_lost()):
            host = self.process.host
            host.wait(lambda: step.has_passed(rank) or is_lost() or self.lacks_room)
        if step.has_passed(rank):
            return
        step.leave(rank)
        self.raise_if_without_room()
        raise PeerLostError(step.formation)

    # ------------------------------------------------------------------ the device

    def launch(self, step: DeviceStep) -> None:
        """Give the device a step, or a meeting."""
        self.launched.append(step)
        self.run_device()

    def run_device(self) -> bool:
        """Let the device go on; return whether anything was over."""
        has_run = False
        while self.launched:
            first: Any = self.launched[0]
            if not all(each.is_over for each in first.barriers):
                break
            first.step.arrive(self.process.rank)
            if not first.step.has_passed(self.process.rank):
                break
            self.launched.popleft()
            first.run()
            has_run = True
        return has_run

    def unblock(self, ranks: tuple[Rank, ...]) -> None:
        """Let what the device has of a group be over."""
        for each in self.launched:
            assert isinstance(each, DeviceStep)
            if each.step.ranks == ranks:
                each.void()
        self.launched = deque(each for each in self.launched if not each.is_over)


NONE: Any = None
"""In place of the queue that a group of one rank lacks."""


def spec_of(
    rank: Rank,
    ranks: Iterable[Rank],
    widths: tuple[int, ...],
    pipelines: tuple[Staged, ...],
    cohort: int,
    together: Mapping[Rank, int],
    *,
    joins: bool,
    shares_memory: bool,
) -> RankSpec:
    """Return what a simulated rank is started with."""
    cell = sorted(ranks)
    memory: Any = object() if shares_memory else None
    return RankSpec(
        rank,
        cell[0],
        len(cell),
        widths,
        widths[-1],
        "",
        1,
        pipelines=pipelines,
        cohort=cohort,
        together=dict(together),
        memory=memory,
        joins=joins,
    )
