"""Random tasks of a group of two whose copies go beside steps: all KV that is read is right.

Steps and copies are work on simulated streams, which may be done in any order that their waits
allow. The scheduler, its hooks, the directory of host pages and the lanes are the product's. The
group may be a pipeline group, whose first stage is steps ahead, and may copy within its steps.
"""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.v1.outputs import ModelRunnerOutput

from comm_pool.layout import Rank
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.host.directory import HostDirectory
from kvadaptor.host.layout import HostLayout
from kvadaptor.host.page_copies import PageCopies
from tests.harness.vllm.mode_schedulers import BLOCK, fresh, scheduler_of
from worker.engine import host_lanes
from worker.engine.host_kv import Calls, HostTier
from worker.engine.host_lanes import HostLanes
from worker.engine.scheduling import ahead_loads, host_blocks
from worker.engine.scheduling.ahead_loads import AheadLoads
from worker.engine.scheduling.block_copies import BlockCopies
from worker.engine.scheduling.connector import BlockConnector
from worker.engine.scheduling.host_blocks import HostBlocks, StoreRules
from worker.engine.scheduling.scheduler import AsyncModeScheduler, ModeScheduler
from worker.engine.scheduling.step_plan import StepPlan

SEEDS = 12
TURNS = 220
TASKS_MAX = 7
RANKS = Rank(0), Rank(1)
GRANT = (1, 2)
"""Two pages, of four blocks each: tasks are preempted, and blocks are free for a moment."""
PROMPTS = (5, 20, 33, 40, 70, 100, 135)
ANSWERS = (1, 2, 10, 30)
GEOMETRY = PageGeometry(2, 2, 1, 1, 1, BLOCK)
TOKEN = 7
"""What every step gives, but for this."""
AT_ONCE_S, NEVER_S = 1e-15, 1e9
"""A byte, as the leader thinks."""

LAST_TOKEN = 8
"""It ends a task, which an asynchronous scheduler may have planned one step more for."""

Content = list[int | None]
"""What stands for the KV of a block: for each token, a hash of all tokens up to it."""


@dataclass(eq=False)
class Work:
    """Something that a device does at once, after all that it waits for."""

    waits_for: list["Work"]
    effect: Callable[[], None]
    is_over: bool = False


@dataclass
class Device:
    """Does what it was given, in a random order that is allowed."""

    draw: random.Random
    waiting: list[Work] = field(default_factory=list)

    def add(self, waits_for: Iterable[Work | None], effect: Callable[[], None]) -> Work:
        work = Work([each for each in waits_for if each is not None], effect)
        self.waiting.append(work)
        return work

    def advance(self, count: int) -> None:
        for _ in range(count):
            ready = [work for work in self.waiting if all(w.is_over for w in work.waits_for)]
            if not ready:
                return
            work = self.draw.choice(ready)
            work.effect()
            work.is_over = True
            self.waiting.remove(work)

    def finish(self, work: Work) -> None:
        while not work.is_over:
            self.advance(1)


@dataclass
class Member:
    """One rank of the group: its blocks, its share of the host pages, and its main stream."""

    device: Device
    share: int
    pages: dict[tuple[int, int], Content]
    """(page, share) -> its content, of all members."""
    kv: dict[int, Content] = field(default_factory=dict)
    last_step: Work | None = None
    ordered: list[Work] = field(default_factory=list)
    """What its next step waits for."""

    def block(self, number: int) -> Content:
        return self.kv.setdefault(number, [None] * BLOCK)

    def launch(self, effect: Callable[[], None]) -> Work:
        self.last_step = self.device.add([self.last_step, *self.ordered], effect)
        self.ordered = []
        return self.last_step


@dataclass
class Copying:
    """See `boxes.Copying`."""

    member: Member
    work: Work

    def is_over(self) -> bool:
        return self.work.is_over

    def order(self) -> None:
        self.member.ordered.append(self.work)


@dataclass
class Stream:
    """A stream of copies in one direction; see `host_lanes.Launcher`."""

    member: Member
    loads: bool
    last: Work | None = None

    def launch(self, copies: PageCopies, *, waits: bool = True) -> Copying:
        member = self.member
        before = [self.last, *([member.last_step, *member.ordered] if waits else [])]
        shares = [
            member.device.add(before, partial(self._copy, block, page))
            for block, page in zip(copies.numbers, copies.pages, strict=True)
        ]
        self.last = member.device.add([*before, *shares], lambda: None)
        return Copying(member, self.last)

    def _copy(self, block: int, page: int) -> None:
        member, place = self.member, (page, self.member.share)
        if self.loads:
            member.kv[block] = list(member.pages.get(place, [None] * BLOCK))
        else:
            member.pages[place] = list(member.block(block))


@dataclass
class Counts:
    hit_tokens: int = 0
    full: int = 0
    stored: int = 0
    ahead: int = 0
    early: int = 0
    """Loads that a step was planned to read while they were under way."""


@dataclass
class Launched:
    """A step that is under way."""

    plan: StepPlan
    works: list[Work]
    gives: set[str]
    """Tasks that get a token."""
    later: list[Callable[[], None]] = field(default_factory=list)
    """What members have still to run of it: the first stage, and then the last one."""

    def run(self) -> None:
        """Let the next member run its part."""
        self.later.pop(0)()


@dataclass(frozen=True)
class Kind:
    """A kind of group."""

    is_async: bool = False
    stages: int = 1
    is_aside: bool = True

    @property
    def split(self) -> Split:
        return Split(self.stages, 2 // self.stages)


KINDS = {
    "beside": Kind(),
    "asynchronous": Kind(is_async=True),
    "stages, beside": Kind(stages=2),
    "stages, within": Kind(stages=2, is_aside=False),
}


class World:
    """A group of two, its tasks, and what must be in their blocks."""

    def __init__(self, base: VllmConfig, hasher: Any, seed: int, kind: Kind) -> None:
        self.draw, self.hasher, self.kind = random.Random(seed), hasher, kind
        self.is_async = kind.is_async
        self.device, self.counts = Device(self.draw), Counts()
        self.layout = HostLayout(2, self.draw.choice([6, 14, 24]), 64)
        memory = memoryview(bytearray(self.layout.data_at))
        directories = [HostDirectory(memory, self.layout, rank, 0.0) for rank in range(2)]
        self.directory, self.directories = directories[0], directories
        pages: dict[tuple[int, int], Content] = {}
        self.members = [Member(self.device, share, pages) for share in range(2)]
        self.pages = pages
        self.tiers = []
        for member, directory in zip(self.members, directories, strict=True):
            directory.set_ready(is_ready=True)
            own, ahead, stores = (Stream(member, loads=loads) for loads in (True, True, False))
            # The leader expects each load to be over at once, or none to be.
            rate = (AT_ONCE_S, NEVER_S)[seed % 2]
            beside = HostLanes(own, ahead, stores, GEOMETRY.page_bytes, rate)
            lanes = beside if kind.is_aside else None
            self.tiers.append(HostTier(directory, GEOMETRY, own, stores, lanes))
        self.scheduler = self._make_scheduler(base)
        self.blocks_of_key: dict[bytes, list[int]] = {}
        """The tokens up to the end of the block that a hash stands for."""
        self.starts = [self.draw.choices(range(1_000, 9_000), k=200) for _ in range(4)]
        self.tokens: dict[str, list[int]] = {}
        self.under_way: list[Launched] = []

    def _make_scheduler(self, base: VllmConfig) -> ModeScheduler:
        kind = AsyncModeScheduler if self.is_async else ModeScheduler
        scheduler = scheduler_of(base, *GRANT, kind=kind)
        is_aside = self.kind.is_aside
        rules = StoreRules((0, 1), 2, is_aside, lambda _: True, lambda tokens: tokens > BLOCK)
        pages = HostBlocks(scheduler, self.directory, self.counts, rules)
        pool, lanes = scheduler.kv_cache_manager.block_pool, self.tiers[0].lanes
        ahead = AheadLoads(pool, BLOCK, lanes, 0.002) if lanes is not None else None
        scheduler.use_connector(BlockConnector(scheduler, (pages,), pages, ahead))
        return scheduler

    # ------------------------------------------------------------------ tasks

    def turn(self, cancels: float) -> None:
        """Add or end a task, run a step, and let some work be done."""
        scheduler, draw = self.scheduler, self.draw
        if draw.random() < 0.35 and len(scheduler.requests) < TASKS_MAX:
            self._add(f"task-{len(self.tokens)}")
        if draw.random() < cancels and scheduler.requests:
            self._collect(0)
            if scheduler.requests:
                scheduler.take_back([draw.choice(list(scheduler.requests))])
        if self.kind.stages > 1:
            self._lead_stages()
        elif scheduler.has_requests():
            self._launch(scheduler.plan_step(lambda: None))
            self._collect(int(self.is_async))
        else:
            self._collect(0)
        self.device.advance(draw.choice([0, 0, 1, 3, 10]))
        draw.choice(self.directories).give(time.monotonic())
        self._check_pages()

    def _lead_stages(self) -> None:
        """Plan as many steps as there are stages, as a leader does, and end the oldest."""
        scheduler, stages = self.scheduler, self.kind.stages
        while len(self.under_way) < stages and scheduler.has_more:
            plan = scheduler.plan_step(lambda: None, stages=stages)
            if plan.is_void:
                break
            self._launch(plan)
            if self.draw.random() < 0.5:
                self._run_first_stage()
        self._collect(max(0, len(self.under_way) - 1))

    def _run_first_stage(self) -> None:
        """Let the first stage run its part of the oldest step that it has not."""
        waiting = [step for step in self.under_way if len(step.later) == self.kind.stages]
        if waiting:
            waiting[0].run()

    def _add(self, name: str) -> None:
        start = self.draw.choice(self.starts)[: self.draw.choice(PROMPTS)]
        prompt = start + [self.draw.randrange(100)] * (self.draw.random() < 0.4)
        request = fresh(name, prompt, self.hasher)
        request.max_tokens = self.draw.choice(ANSWERS)
        assert request.sampling_params is not None
        request.sampling_params.stop_token_ids = [LAST_TOKEN]
        self.tokens[name] = prompt
        self.scheduler.add_task(request, [])

    # ------------------------------------------------------------------ steps

    def _launch(self, plan: StepPlan) -> None:
        copies, scheduled = plan.output.kv_connector_metadata, plan.output.num_scheduled_tokens
        copies = copies if isinstance(copies, BlockCopies) else BlockCopies()
        self.counts.stored += len(copies.store_blocks)
        self.counts.ahead += len(copies.ahead_blocks)
        lanes = self.tiers[0].lanes
        self.counts.early += lanes is not None and not all(map(lanes.is_over, copies.awaits))
        spans, gives = [], set()
        for name, count in scheduled.items():
            request = self.scheduler.requests[name]
            end, size = request.num_computed_tokens, self.scheduler.block_size
            for number, key in enumerate(request.block_hashes, 1):
                self.blocks_of_key.setdefault(bytes(key), self._known(name)[: number * size])
            spans.append((name, end - count, end, list(self.scheduler._blocks_of(name))))
            if end >= request.num_tokens:
                gives.add(name)
        step = Launched(plan, [], gives)
        self.under_way.append(step)
        for number in (1, 0) if self.kind.stages > 1 else (0, 1):
            calls = self.tiers[number].copies(copies, RANKS, self.kind.split, number, None)
            step.later.append(partial(self._run, step, number, calls, spans))
        while step.later and self.kind.stages == 1:
            step.run()

    def _run(
        self,
        step: Launched,
        number: int,
        calls: Calls,
        spans: list[tuple[str, int, int, list[int]]],
    ) -> None:
        """Let a member run its part of a step; a later stage waits for the one before."""
        member, (begin, after) = self.members[number], calls
        if self.kind.stages > 1:
            member.ordered += step.works
        for call in (
            begin,
            lambda: step.works.append(member.launch(partial(self._compute, member, spans))),
            after,
            self.tiers[number].look,
        ):
            call()
            while self.device.waiting and not self.kind.is_aside:
                self.device.advance(1)

    def _compute(self, member: Member, spans: list[tuple[str, int, int, list[int]]]) -> None:
        for name, start, end, blocks in spans:
            for place in range(start, end):
                member.block(blocks[place // BLOCK])[place % BLOCK] = self._value(name, place)
        for name, _, end, blocks in spans:
            found = [member.block(blocks[place // BLOCK])[place % BLOCK] for place in range(end)]
            wanted = [self._value(name, place) for place in range(end)]
            assert found == wanted, f"member {member.share} reads other KV for {name}"

    def _collect(self, most: int) -> None:
        """Take in steps until no more than this are under way."""
        while len(self.under_way) > most:
            while self.under_way[0].later:
                self.under_way[0].run()
            step = self.under_way.pop(0)
            for work in step.works:
                self.device.finish(work)
            names = list(step.plan.output.num_scheduled_tokens)
            here = self.scheduler.requests
            given = [name in step.gives and name in here for name in names]
            tokens = [[self._token()] if gives else [] for gives in given]
            index = {name: number for number, name in enumerate(names)}
            result = ModelRunnerOutput(
                req_ids=names, req_id_to_index=index, sampled_token_ids=tokens
            )
            self.scheduler.finish_step(step.plan, result)
            self.tiers[0].step_is_over()

    def _token(self) -> int:
        return LAST_TOKEN if self.draw.random() < 0.1 else TOKEN

    # ------------------------------------------------------------------ what is right

    def _known(self, name: str) -> list[int]:
        return self.tokens[name] + [TOKEN] * 300

    def _value(self, name: str, place: int) -> int:
        return hash(tuple(self._known(name)[: place + 1]))

    def _check_pages(self) -> None:
        """Complete host pages of the leader hold the blocks that their hashes stand for."""
        for page in self.directory._own:
            key = self.directory.entries.hash_of(page)
            if (
                key is None
                or key not in self.blocks_of_key
                or not self.directory.entries.is_complete(page)
            ):
                continue
            tokens = self.blocks_of_key[key]
            ends = range(len(tokens) - BLOCK + 1, len(tokens) + 1)
            wanted = [hash(tuple(tokens[:end])) for end in ends]
            for share in range(2):
                assert self.pages[page, share] == wanted, f"page {page} holds another block"


def let_copies_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_lanes, "LOADS_UNDER_WAY", 2)
    monkeypatch.setattr(host_lanes, "LOADS_AT_ONCE", 1)
    monkeypatch.setattr(host_lanes, "STORE_WAIT_S", 0.0)
    monkeypatch.setattr(ahead_loads, "IDLE_S", 0.0)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("cancels", "looks"), [(0.06, 128), (0.4, 1)])
def test_all_kv_that_is_read_is_right(
    base: VllmConfig,
    hasher: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    cancels: float,
    looks: int,
) -> None:
    let_copies_overlap(monkeypatch)
    monkeypatch.setattr(host_blocks, "LOOKS_PER_STEP", looks)
    stored = ahead = hits = early = 0
    for seed in range(SEEDS):
        world = World(base, hasher, seed, kind)
        for _ in range(TURNS):
            world.turn(cancels)
        stored += world.counts.stored
        ahead += world.counts.ahead
        hits += world.counts.hit_tokens
        early += world.counts.early
    assert min(stored, hits) > 0, "each kind of copy was drawn"
    assert bool(ahead) == kind.is_aside
    assert bool(early) == kind.is_async


@pytest.mark.parametrize(("kind", "seed"), [("asynchronous", 36), ("beside", 17)])
def test_a_load_that_begins_too_early_is_noticed(
    base: VllmConfig, hasher: Any, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    """A load ahead waits for no step: it needs vLLM's late frees, and waits for stores."""
    let_copies_overlap(monkeypatch)
    world = World(base, hasher, seed, KINDS[kind])
    if world.is_async:
        world.scheduler.defer_block_free = False
    else:
        monkeypatch.setattr(HostLanes, "delay_loads", lambda _: None)
    with pytest.raises(AssertionError, match=r"reads other KV|holds another block"):
        for _ in range(TURNS):
            world.turn(0.06)
