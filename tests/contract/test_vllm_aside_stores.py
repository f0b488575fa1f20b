"""What vLLM's scheduler lets a group store beside its steps: only what is filled by then."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig

from kvadaptor.host.directory import HostDirectory
from kvadaptor.host.layout import HostLayout
from tests.harness.vllm.mode_schedulers import BLOCK, finish, fresh, ids, scheduler_of
from worker.engine.scheduling.block_copies import BlockCopies
from worker.engine.scheduling.connector import BlockConnector
from worker.engine.scheduling.host_blocks import HostBlocks, StoreRules
from worker.engine.scheduling.scheduler import ModeScheduler
from worker.engine.scheduling.step_plan import StepPlan

PROMPT = list(range(100, 100 + BLOCK + 8))
"""One full block and eight tokens."""


class Counts:
    """Counts of host pages."""

    hit_tokens = full = 0


class Group:
    """A scheduler whose tasks store beside steps."""

    def __init__(self, base: VllmConfig, hasher: Any) -> None:
        self.scheduler: ModeScheduler = scheduler_of(base, 1, 2, 3)
        self._hasher = hasher
        layout = HostLayout(1, 16, 64)
        directory = HostDirectory(memoryview(bytearray(layout.data_at)), layout, 0, 0.0)
        directory.set_ready(is_ready=True)
        rules = StoreRules((0,), 1, True, lambda _: True, lambda _: False)
        pages = HostBlocks(self.scheduler, directory, Counts(), rules)
        self.scheduler.use_connector(BlockConnector(self.scheduler, (pages,), pages))

    def add(self, name: str, prompt: list[int], tokens: int = 50) -> None:
        request = fresh(name, prompt, self._hasher)
        request.max_tokens = tokens
        self.scheduler.add_task(request, [])

    def plan(self) -> tuple[StepPlan, list[int]]:
        """The next step, and the blocks that it stores."""
        plan = self.scheduler.plan_step(lambda: None)
        copies = plan.output.kv_connector_metadata
        assert copies is None or isinstance(copies, BlockCopies)
        return plan, copies.store_blocks if copies is not None else []


@pytest.fixture
def group(base: VllmConfig, hasher: Any) -> Group:
    return Group(base, hasher)


def test_blocks_that_a_step_fills_for_two_tasks_are_stored_after_it(group: Group) -> None:
    """The second task hits what the first one computes in the same step."""
    group.add("a", PROMPT)
    group.add("b", [*PROMPT, 1])
    plan, stored = group.plan()
    assert ids(group.scheduler, "a")[0] == ids(group.scheduler, "b")[0]
    assert plan.output.num_scheduled_tokens == {"a": BLOCK + 8, "b": 9}
    assert not stored, "the copy would begin before the step"
    finish(group.scheduler, plan)
    plan, stored = group.plan()
    assert stored == ids(group.scheduler, "a")[:1]
    finish(group.scheduler, plan)


def test_the_last_block_of_an_ended_task_is_stored(group: Group) -> None:
    group.add("a", PROMPT, tokens=1)
    plan, _ = group.plan()
    blocks = ids(group.scheduler, "a")
    finish(group.scheduler, plan)
    assert group.plan()[1] == blocks[:1]


def test_nothing_is_stored_of_a_task_that_ends_after_its_group_is_left(group: Group) -> None:
    """Its step was in flight. Until the group begins again, others may have used its blocks."""
    group.add("a", PROMPT, tokens=1)
    plan, _ = group.plan()
    assert group.scheduler.blocks is not None
    group.scheduler.blocks.stop()
    group.scheduler.withdraw()
    finish(group.scheduler, plan)
    group.scheduler.withdraw()
    group.scheduler.grant(np.array([1, 2, 3]))
    assert not group.plan()[1]


def test_nothing_is_stored_from_pages_that_are_set_aside_for_early_copies(group: Group) -> None:
    group.add("a", PROMPT, tokens=1)
    finish(group.scheduler, group.plan()[0])
    assert group.scheduler.set_aside(3).size == 3
    assert not group.plan()[1]
