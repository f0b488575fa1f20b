"""Blocks that a step loads: they are written until it is over, and void ones are not found."""

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig

from coordinator.protocol.terms import Tier
from gateway.admission.tiers import PRIORITY_OF_TIER
from tests.harness.vllm.mode_schedulers import (
    BLOCK,
    BUDGET,
    PROMPT,
    directory_of,
    finish,
    fresh,
    ids,
    scheduler_of,
    states_of,
    step,
)
from worker.engine.scheduling.block_copies import BlockCopies
from worker.engine.scheduling.connector import BlockConnector
from worker.engine.scheduling.scheduler import AsyncModeScheduler, ModeScheduler


class Source:
    """A source that has every block, until it has given `most` of them or `is_empty`.

    Those at `void` places change meanwhile.
    """

    def __init__(self) -> None:
        self.is_empty = False
        self.most = 1_000
        self.void: set[int] = set()
        self._count = 0

    def refresh(self) -> None:
        """Nothing changes by itself."""

    def take(self, key: bytes) -> int | None:
        self._count += 1
        return None if self.is_empty or self._count > self.most else self._count

    def let_go(self, places: Iterable[int]) -> None:
        """Nothing is kept."""

    def is_sooner(self, tokens: int) -> bool:
        return True

    def load(self, copies: BlockCopies, name: str, blocks: list[int], places: list[int]) -> None:
        copies.lost_blocks += blocks
        copies.lost_places += places

    def goes_ahead(self, tokens: int) -> bool:
        return False

    def load_ahead(
        self, copies: BlockCopies, name: str, blocks: list[int], places: list[int]
    ) -> None:
        raise NotImplementedError

    def gone(self, copies: BlockCopies) -> set[int]:
        pairs = zip(copies.lost_blocks, copies.lost_places, strict=True)
        return {block for block, place in pairs if place in self.void}


def test_a_step_writes_what_it_loads(base: VllmConfig, hasher: Any) -> None:
    """A migration copies these blocks after it, not beside it."""
    made = scheduler_of(base, 1, 2)
    made.use_connector(BlockConnector(made, (Source(),)))
    made.add_task(fresh("a", PROMPT, hasher), [])
    plan = made.plan_step(lambda: None)
    assert set(made.written_blocks().tolist()) == set(ids(made, "a"))
    assert states_of(made)["a"].settled == 0
    finish(made, plan)
    assert not made.written_blocks().size
    assert states_of(made)["a"].settled == len(PROMPT)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def loading(base: VllmConfig, hasher: Any, source: Source) -> ModeScheduler:
    """A scheduler whose task loads two blocks in the step that has just ended; the second is void.

    Its prompt has 80 tokens: two full blocks, and half of one.
    """
    made = scheduler_of(base, 1, 2)
    made.use_connector(BlockConnector(made, (source,)))
    made.add_task(fresh("a", PROMPT, hasher), [])
    source.void = {2}
    plan = made.plan_step(lambda: None)
    assert plan.output.num_scheduled_tokens == {"a": len(PROMPT) - 2 * BLOCK}
    source.is_empty = True
    finish(made, plan)
    return made


def test_what_was_loaded_in_vain_is_computed_again(loading: ModeScheduler, hasher: Any) -> None:
    assert step(loading) == {"a": len(PROMPT) - BLOCK}
    assert loading.requests["a"].output_token_ids[:] == [7]
    loading.add_task(fresh("b", PROMPT, hasher), [])
    assert step(loading) == {"a": 1, "b": len(PROMPT) - 2 * BLOCK}, "from then on others hit it"


@pytest.mark.parametrize("end", ["cancelled", "preempted"])
def test_nobody_finds_a_void_block(loading: ModeScheduler, hasher: Any, end: str) -> None:
    first = ids(loading, "a")[0]
    if end == "cancelled":
        loading.take_back(["a"])
        loading.add_task(fresh("a", PROMPT, hasher), [])
    else:
        request = loading.requests["a"]
        loading.running.remove(request)
        loading._preempt_request(request, 0.0)
    assert step(loading) == {"a": len(PROMPT) - BLOCK}, "the first block alone is there"
    assert ids(loading, "a")[0] == first


def test_tasks_that_share_a_void_block_go_on(base: VllmConfig, hasher: Any, source: Source) -> None:
    """The second hits what the first loads in the same step, and the first computes again."""
    made = scheduler_of(base, 1, 2, 3)
    made.use_connector(BlockConnector(made, (source,)))
    source.void = {2}
    for name in ("a", "b"):
        made.add_task(fresh(name, PROMPT, hasher), [])
    plan = made.plan_step(lambda: None)
    assert ids(made, "a")[:2] == ids(made, "b")[:2]
    source.is_empty = True
    finish(made, plan)
    computed = [step(made) for _ in range(3)]
    assert sum(each.get("a", 0) for each in computed) >= len(PROMPT) - BLOCK
    assert sum(each.get("b", 0) for each in computed) >= len(PROMPT) - 2 * BLOCK
    assert all(made.requests[name].output_token_ids for name in ("a", "b"))
    made.add_task(fresh("c", PROMPT, hasher), [])
    assert step(made)["c"] == len(PROMPT) - 2 * BLOCK, "from then on others hit it"


@pytest.fixture
def sharing(base: VllmConfig, hasher: Any, source: Source) -> ModeScheduler:
    """A scheduler whose task `a` computes a block again that `b`, which is longer, counts on."""
    made = scheduler_of(base, 1, 2, 3)
    made.use_connector(BlockConnector(made, (source,)))
    made.add_task(fresh("other", [5] * 20, hasher), [])
    step(made)
    source.void, source.most = {2}, 2
    for name, tail in (("a", ()), ("b", range(2 * BUDGET - 22))):
        made.add_task(fresh(name, [*PROMPT, *tail], hasher), [])
    plan = made.plan_step(lambda: None)
    assert ids(made, "a")[:2] == ids(made, "b")[:2]
    source.is_empty = True
    finish(made, plan)
    computed = {name: made.requests[name].num_computed_tokens for name in "ab"}
    assert computed == {"a": BLOCK, "b": 2 * BLOCK}
    return made


def test_a_task_keeps_its_place_while_others_count_on_what_it_computes_again(
    sharing: ModeScheduler,
) -> None:
    """Tasks before it would be computed from a void block, or preempt it for one of their own."""
    sharing.requests["a"].priority = PRIORITY_OF_TIER[Tier.BATCH]
    is_short = sharing.blocks_free < len(sharing.running) + BUDGET // BLOCK
    assert is_short, "else none would change places"
    assert step(sharing)["a"] == len(PROMPT) - BLOCK
    for _ in range(3):
        step(sharing)
    order = [each.request_id for each in sharing.running]
    assert order == ["other", "b", "a"], "it has what it had"


def test_no_prompt_is_paced_of_which_others_count_on_what_it_computes_again(
    sharing: ModeScheduler,
) -> None:
    plan = sharing.plan_step(lambda: None, pace_tokens=8)
    assert finish(sharing, plan)["a"] == len(PROMPT) - BLOCK
    for _ in range(3):
        step(sharing)
    sharing.add_task(fresh("new", [6] * 60, None), [])
    plan = sharing.plan_step(lambda: None, pace_tokens=8)
    assert finish(sharing, plan)["new"] < 60, "then prompts are paced again"


def test_stages_get_no_step_after_one_whose_loads_may_be_void(
    base: VllmConfig, hasher: Any, source: Source
) -> None:
    """vLLM computes a void block again, but takes in what later steps in flight have read."""
    made = scheduler_of(base, 1, 2, 3)
    made.use_connector(BlockConnector(made, (source,)))
    source.is_empty = True
    made.add_task(fresh("before", [5] * 40, hasher), [])
    before = made.plan_step(lambda: None, stages=3)
    source.is_empty, source.void = False, {3}
    made.add_task(fresh("a", PROMPT, hasher), [])
    assert made.has_more
    plan = made.plan_step(lambda: None, stages=3)
    source.is_empty = True
    made.add_task(fresh("b", [*PROMPT[:BLOCK], *[9] * 20], hasher), [])
    seen: list[bool] = [made.has_more]
    finish(made, before)
    seen.append(made.has_more)  # The step with loads is in flight.
    finish(made, plan)
    assert [*seen, made.has_more] == [False, False, True]
    assert made.plan_step(lambda: None, stages=3).output.num_scheduled_tokens["a"] == (
        len(PROMPT) - BLOCK
    )


def test_an_asynchronous_scheduler_says_that_no_step_may_follow(
    base: VllmConfig, hasher: Any, source: Source
) -> None:
    """A rank's main loop plans one step ahead; this one would compute from void KV."""
    made = scheduler_of(base, 1, 2, 3, kind=AsyncModeScheduler)
    made.use_connector(BlockConnector(made, (source,)))
    source.void = {2}
    made.add_task(fresh("a", PROMPT, hasher), [])
    plan = made.plan_step(lambda: None)
    source.is_empty = True
    seen = [made.may_be_void]
    finish(made, plan)
    assert [*seen, made.may_be_void] == [True, False]
    assert step(made) == {"a": len(PROMPT) - BLOCK}
    assert made.requests["a"].output_token_ids[:] == [7]


def test_a_void_block_keeps_no_other_task_out_of_the_directory(
    base: VllmConfig, hasher: Any, source: Source
) -> None:
    made = scheduler_of(base, 1, 2, 3, 4, kind=AsyncModeScheduler)
    made.use_connector(BlockConnector(made, (source,)))
    directory = directory_of(made)
    source.void = {2}
    made.add_task(fresh("a", PROMPT, hasher), [])
    made.add_task(fresh("b", [5] * len(PROMPT), hasher), [])
    plan = made.plan_step(lambda: None)
    void = ids(made, "a")[1]
    source.is_empty = True
    finish(made, plan)
    entered = set(directory.entries()[0])
    assert entered.issuperset(ids(made, "b")[:2])
    assert void not in entered


def test_a_plan_of_copies_alone_is_sent(base: VllmConfig) -> None:
    plan = scheduler_of(base, 1).plan_step(lambda: None, stages=2)
    assert plan.is_void
    plan.output.kv_connector_metadata = BlockCopies(ahead=[(0, 1)])
    assert plan.is_empty
    assert not plan.is_void, "its members begin a load"
