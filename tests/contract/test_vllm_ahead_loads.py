"""Blocks that are loaded ahead of their task: vLLM finds them, and none is held too long."""

import math
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig

from tests.harness.vllm.mode_schedulers import BLOCK, finish, fresh, ids, scheduler_of, step
from worker.engine.scheduling import ahead_loads
from worker.engine.scheduling.ahead_loads import AheadLoads
from worker.engine.scheduling.block_copies import BlockCopies
from worker.engine.scheduling.connector import OFFER_S, BlockConnector
from worker.engine.scheduling.scheduler import ModeScheduler
from worker.engine.scheduling.step_plan import StepPlan

PROMPT = list(range(100, 200))
"""Three full blocks and four tokens."""
OTHER = list(range(300, 310))


class Pages:
    """A source that has all blocks, each once, and copies that end when a test says so."""

    def __init__(self) -> None:
        self.is_empty = False
        self.kept: set[int] = set()
        self.over: set[int] = set()
        self.left: dict[int, float] = {}
        """Seconds that loads still take, where a test says so."""
        self.waits = 0
        self._count = 0

    def refresh(self) -> None:
        """Nothing changes by itself."""

    def take(self, key: bytes) -> int | None:
        if self.is_empty:
            return None
        self._count += 1
        self.kept.add(self._count)
        return self._count

    def let_go(self, places: Iterable[int]) -> None:
        self.kept.difference_update(places)

    def is_sooner(self, tokens: int) -> bool:
        return True

    def load(self, copies: BlockCopies, name: str, blocks: list[int], places: list[int]) -> None:
        copies.load_blocks += blocks
        copies.load_pages += places

    def goes_ahead(self, tokens: int) -> bool:
        return tokens > BLOCK

    def load_ahead(
        self, copies: BlockCopies, name: str, blocks: list[int], places: list[int]
    ) -> None:
        copies.ahead_blocks += blocks
        copies.ahead_pages += places

    def gone(self, copies: BlockCopies) -> set[int]:
        return set()

    # -- the copies

    def is_over(self, number: int) -> bool:
        return number in self.over

    def remaining_s(self, number: int) -> float:
        return 0.0 if number in self.over else self.left.get(number, math.inf)

    def wait_loads(self, limit_s: float) -> None:
        self.waits += 1


class Group:
    """A scheduler over eight blocks, whose tasks load ahead."""

    def __init__(self, base: VllmConfig, hasher: Any, *indices: int) -> None:
        self.scheduler: ModeScheduler = scheduler_of(base, *(indices or (1, 2)))
        self.pages, self._hasher = Pages(), hasher
        pool = self.scheduler.kv_cache_manager.block_pool
        self.ahead = AheadLoads(pool, BLOCK, self.pages, OFFER_S)
        hooks = BlockConnector(self.scheduler, (self.pages,), None, self.ahead)
        self.scheduler.use_connector(hooks)
        self.hooks, self.free = hooks, self.scheduler.blocks_free

    def add(self, name: str, prompt: list[int]) -> None:
        self.scheduler.add_task(fresh(name, prompt, self._hasher), [])

    def plan(self) -> tuple[StepPlan, BlockCopies | None]:
        plan = self.scheduler.plan_step(lambda: None)
        copies = plan.output.kv_connector_metadata
        assert copies is None or isinstance(copies, BlockCopies)
        return plan, copies

    def end(self, *names: str) -> None:
        self.scheduler.take_back(names)
        step(self.scheduler)


@pytest.fixture
def group(base: VllmConfig, hasher: Any) -> Group:
    return Group(base, hasher)


def begin(group: Group, prompt: list[int] = PROMPT) -> BlockCopies:
    """The step with which a task's load begins; it computes nothing."""
    group.add("a", prompt)
    plan, copies = group.plan()
    assert plan.is_empty
    assert copies is not None
    finish(group.scheduler, plan)
    return copies


def test_a_task_waits_for_its_load_and_hits_it(group: Group) -> None:
    copies = begin(group)
    assert copies.ahead == [(0, 3)]
    blocks = copies.ahead_blocks
    assert group.scheduler.blocks_free == group.free - 3
    plan, later = group.plan()
    assert (plan.is_empty, later) == (True, None)
    finish(group.scheduler, plan)
    assert len(group.pages.kept) == 3
    group.pages.over.add(0)
    plan, follows = group.plan()
    assert follows is not None
    assert follows.awaits == [0], "each member waits for its own copies"
    assert plan.output.num_scheduled_tokens == {"a": 4}
    assert ids(group.scheduler, "a")[:3] == blocks
    assert len(group.pages.kept) == 3, "a member may still read them"
    # A migration leaves these blocks to the end of the step.
    assert set(group.scheduler.written_blocks().tolist()) >= set(blocks)
    finish(group.scheduler, plan)
    assert not group.pages.kept
    group.end("a")
    assert group.scheduler.blocks_free == group.free


def test_others_run_meanwhile(group: Group) -> None:
    group.add("b", OTHER)
    group.add("a", PROMPT)
    assert step(group.scheduler) == {"b": len(OTHER)}
    assert step(group.scheduler) == {"b": 1}
    group.pages.over.add(0)
    assert step(group.scheduler) == {"b": 1, "a": 4}


def test_an_empty_step_waits_a_moment_for_loads_that_have_begun(group: Group) -> None:
    begin(group)
    waits = group.pages.waits
    step(group.scheduler)
    assert group.pages.waits == waits + 1


def test_short_loads_are_part_of_the_step(group: Group) -> None:
    group.add("a", PROMPT[:40])
    plan, copies = group.plan()
    assert copies is not None
    assert (copies.ahead, len(copies.load_blocks)) == ([], 1)
    finish(group.scheduler, plan)


def test_without_room_vllm_waits_for_blocks(base: VllmConfig, hasher: Any) -> None:
    """Loads ahead take no more than what vLLM itself would need for the task."""
    group = Group(base, hasher, 1)
    group.add("b", OTHER)
    step(group.scheduler)
    group.add("a", PROMPT)
    plan, copies = group.plan()
    assert plan.output.num_scheduled_tokens == {"b": 1}
    assert copies is None
    finish(group.scheduler, plan)
    assert not group.ahead.under_way


def test_an_ended_task_s_blocks_are_free_once_nothing_writes_to_them(group: Group) -> None:
    begin(group)
    group.scheduler.take_back(["a"])
    step(group.scheduler)
    assert group.scheduler.blocks_free == group.free - 3
    group.pages.over.add(0)
    group.add("b", OTHER)
    plan, copies = group.plan()
    assert copies is not None
    assert copies.awaits == [0]
    assert group.scheduler.blocks_free == group.free - 1
    finish(group.scheduler, plan)
    assert not group.pages.kept


def test_what_was_loaded_for_an_ended_task_can_be_hit(group: Group) -> None:
    begin(group)
    group.scheduler.take_back(["a"])
    group.pages.over.add(0)
    step(group.scheduler)
    group.pages.is_empty = True
    group.add("b", PROMPT)
    assert step(group.scheduler) == {"b": 4}


def test_pages_are_kept_until_a_step_of_all_members_has_waited(group: Group) -> None:
    """The leader alone ends a step that computes nothing: others may still copy from the pages."""
    begin(group)
    group.scheduler.take_back(["a"])
    group.pages.over.add(0)
    plan, copies = group.plan()
    assert plan.is_empty
    finish(group.scheduler, plan)
    assert copies is None
    assert len(group.pages.kept) == 3
    group.add("b", OTHER)
    plan, copies = group.plan()
    assert copies is not None
    assert copies.awaits == [0]
    finish(group.scheduler, plan)
    assert not group.pages.kept


def test_what_no_step_has_waited_for_is_not_hit_later(group: Group) -> None:
    begin(group)
    group.scheduler.take_back(["a"])
    group.pages.over.add(0)
    step(group.scheduler)
    group.hooks.stop()
    assert not group.pages.kept
    assert group.scheduler.blocks_free == group.free
    group.pages.is_empty = True
    group.add("b", PROMPT)
    assert step(group.scheduler) == {"b": 96}


def test_a_group_that_is_left_gives_all_up(group: Group) -> None:
    begin(group)
    group.hooks.stop()
    assert group.scheduler.blocks_free == group.free
    assert not group.pages.kept
    group.pages.over.add(0)
    group.pages.is_empty = True
    assert step(group.scheduler) == {"a": 96}, "nothing that was half loaded is hit"


def test_loaded_blocks_are_held_for_a_time(group: Group) -> None:
    """Their task may find no room: then others may have the blocks."""
    begin(group)
    group.pages.over.add(0)
    group.ahead.look(100.0)
    group.ahead.look(100.0 + OFFER_S)
    assert group.scheduler.blocks_free == group.free - 3
    group.ahead.look(100.1 + OFFER_S)
    assert group.scheduler.blocks_free == group.free


def arrive_early(group: Group) -> None:
    """Let a load arrive that will be over when the step in flight is."""
    group.pages.left[0] = ahead_loads.LEAD_MAX_S
    group.ahead.look(100.0)
    group.ahead.look(101.0, is_busy=True)


def test_a_step_reads_what_arrives_while_the_one_before_it_runs(group: Group) -> None:
    begin(group)
    group.pages.left[0] = 0.012
    group.ahead.look(100.0)
    group.ahead.look(100.01, is_busy=True)
    assert group.ahead.is_loading("a"), "steps take 10 ms"
    group.ahead.look(100.03)
    assert group.ahead.is_loading("a"), "no step is in flight: this one would wait for all of it"
    group.ahead.look(100.05, is_busy=True)
    assert not group.ahead.is_loading("a")
    plan, copies = group.plan()
    assert copies is not None
    assert copies.awaits == [0]
    assert plan.output.num_scheduled_tokens == {"a": 4}
    finish(group.scheduler, plan)
    assert not group.pages.kept


def test_no_step_waits_long_for_a_load(group: Group) -> None:
    begin(group)
    group.pages.left[0] = 1.01 * ahead_loads.LEAD_MAX_S
    group.ahead.look(100.0)
    group.ahead.look(101.0, is_busy=True)
    assert group.ahead.is_loading("a")


def test_blocks_that_are_still_written_outlast_their_task(group: Group) -> None:
    begin(group)
    arrive_early(group)
    group.scheduler.take_back(["a"])
    step(group.scheduler)
    assert group.scheduler.blocks_free == group.free - 3
    group.pages.over.add(0)
    step(group.scheduler)
    assert group.scheduler.blocks_free == group.free


def test_a_step_that_waits_for_a_load_lets_others_have_its_blocks(group: Group) -> None:
    """They write to them after that step."""
    begin(group)
    arrive_early(group)
    group.scheduler.take_back(["a"])
    group.add("b", OTHER)
    assert step(group.scheduler) == {"b": len(OTHER)}
    group.scheduler.take_back(["b"])
    step(group.scheduler)
    assert group.scheduler.blocks_free == group.free
    assert not group.pages.kept


def test_the_part_that_the_device_has_is_held_too(group: Group) -> None:
    group.pages.is_empty = True
    group.add("first", PROMPT[:40])
    step(group.scheduler)
    group.end("first")
    group.pages.is_empty = False
    copies = begin(group)
    assert copies.ahead == [(0, 2)]
    assert group.scheduler.blocks_free == group.free - 3
    group.pages.over.add(0)
    assert step(group.scheduler) == {"a": 4}


def test_few_loads_go_at_once(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_loads, "LOADS_MAX", 1)
    group.add("a", PROMPT)
    group.add("b", OTHER + PROMPT)
    plan, copies = group.plan()
    assert copies is not None
    assert len(copies.ahead) == 1
    assert copies.load_blocks, "the other's are part of the step"
    finish(group.scheduler, plan)
