"""How the decodes of a pipeline group are divided among its steps, in a real vLLM scheduler."""

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.outputs import ModelRunnerOutput

from tests.harness.vllm.mode_schedulers import (
    WIDTH,
    base_config,
    fresh,
    hasher_of,
    restored,
    scheduler_of,
    states_of,
    step,
)
from tests.harness.worker.first_stage import FirstStage
from worker.engine.runners.stage_link import PIECES
from worker.engine.scheduling.block_entries import BlockEntries
from worker.engine.scheduling.micro_batches import AHEAD_MAX, hidden_decodes, is_due
from worker.engine.scheduling.scheduler import AsyncModeScheduler, ModeScheduler
from worker.engine.scheduling.step_plan import StepPlan

STAGES = 4
PAGES = 64
EVERY_PAGE = range(1, PAGES)
TASKS = 64
TOKENS = 50
"""Tokens of each answer of `fresh`."""


@pytest.fixture(scope="module")
def base() -> VllmConfig:
    return base_config()


@pytest.fixture(scope="module")
def hasher(base: VllmConfig) -> Any:
    return hasher_of(base)


# ---------------------------------------------------------------------- the rule


@dataclass(frozen=True)
class Progress:
    """A running task."""

    name: int
    num_tokens: int
    num_computed_tokens: int
    num_prompt_tokens: int = 0
    max_tokens: int = 100
    use_structured_output: bool = False
    next_decode_eligible_step: int = 0

    @property
    def in_flight(self) -> int:
        """Steps in flight that decode for it."""
        return self.num_computed_tokens - self.num_tokens + 1

    @property
    def is_ready(self) -> bool:
        return self.num_tokens - self.num_computed_tokens == 1

    @property
    def decodes(self) -> bool:
        return self.num_tokens - self.num_computed_tokens <= 1


running_tasks = st.lists(
    st.tuples(st.integers(1, 9), st.integers(-1, 9)), min_size=1, max_size=40
).map(
    lambda pairs: [
        Progress(number, tokens, max(0, tokens - to_compute))
        for number, (tokens, to_compute) in enumerate(pairs)
    ]
)


@given(running_tasks, st.sampled_from((2, 4, 8)), st.integers(0, 2**39))
def test_a_step_gets_a_share_of_the_decodes(
    running: list[Progress], stages: int, turn: int
) -> None:
    hidden = hidden_decodes(running, stages, turn)
    ready = [each for each in running if each.is_ready]
    shown = [each for each in ready if each not in hidden]
    share = sum(each.decodes for each in running) / stages
    assert max(1, floor(share)) <= len(shown) <= ceil(share) or shown == ready
    assert len(shown) <= ceil(share)
    assert bool(shown) == bool(ready), "somebody is shown if somebody is ready"
    assert hidden <= set(ready), "prompts and what is in flight are not hidden"
    assert shown == ready[: len(shown)], "the oldest come first"


ahead_tasks = st.lists(
    st.builds(
        lambda tokens, in_flight, **more: Progress(0, tokens, tokens - 1 + in_flight, **more),
        st.integers(2, 9),
        st.integers(-4, AHEAD_MAX),
        max_tokens=st.integers(8, 12),
        use_structured_output=st.booleans(),
        next_decode_eligible_step=st.integers(0, 3),
    ),
    min_size=1,
    max_size=40,
).map(lambda tasks: [replace(each, name=number) for number, each in enumerate(tasks)])


@given(ahead_tasks, st.sampled_from((2, 4)), st.integers(0, 2**39))
def test_devices_that_pass_tokens_on_get_tasks_ahead_of_their_tokens(
    running: list[Progress], stages: int, turn: int
) -> None:
    hidden = hidden_decodes(running, stages, turn, AHEAD_MAX)
    decoding = [each for each in running if each.decodes]
    shown = [each for each in decoding if each not in hidden]
    assert hidden <= set(decoding), "prompts are not hidden"
    assert len(shown) <= ceil(len(decoding) / stages)
    for each in shown:
        assert each.in_flight < AHEAD_MAX
        assert not (each.in_flight and each.use_structured_output), "the host knows no mask for it"
        assert not each.in_flight or each.num_tokens + each.in_flight < each.max_tokens
    free = [each for each in decoding if not each.in_flight]
    assert bool(shown) or not free
    newest = max((each.next_decode_eligible_step for each in decoding), default=0)
    waits = {
        each for each in decoding if each.in_flight and each.next_decode_eligible_step == newest
    }
    due = {each for each in decoding if is_due(each, AHEAD_MAX)}
    assert waits.isdisjoint(shown) or due <= waits, "the first stage waits for no step's token"
    turns = [each.next_decode_eligible_step for each in shown]
    waiting = [each.next_decode_eligible_step for each in free if each in hidden]
    assert max(turns, default=0) <= min(waiting, default=3), "who waits longest comes first"


@given(st.integers(1, 99), st.sampled_from((2, 4, 8)), st.integers(0, 2**39))
def test_shares_of_a_round_are_all_decodes(count: int, stages: int, turn: int) -> None:
    running = [Progress(number, 5, 4) for number in range(count)]
    shares = [count - len(hidden_decodes(running, stages, turn + more)) for more in range(stages)]
    assert sum(shares) == max(count, stages)
    assert max(shares) - min(shares) <= 1


# ---------------------------------------------------------------------- vLLM's scheduler


@dataclass
class Pipeline:
    """A scheduler with several steps in flight, whose tasks get tokens that name their place."""

    scheduler: ModeScheduler
    stages: int = STAGES
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """Of each planned step: its decodes, and all tasks that decode."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    first_stage: FirstStage | None = None
    void: int = 0
    """Plans of nothing, which nobody gets."""
    preempted_beside: int = 0
    """Tasks that were preempted while steps were in flight."""
    _inflight: deque[tuple[StepPlan, dict[str, list[int]]]] = field(default_factory=deque)

    def turn(self) -> None:
        """As a leader does: plan as many steps as there are stages, and finish the oldest."""
        wanted = self.stages + self.scheduler.ahead_max - 1
        while len(self._inflight) < wanted and self.scheduler.has_more:
            before = self.scheduler.counted().preemptions
            plan = self.scheduler.plan_step(lambda: None, stages=self.stages)
            if self._inflight:
                self.preempted_beside += self.scheduler.counted().preemptions - before
            assert len(self.scheduler.running) <= self.scheduler.max_num_running_reqs
            if plan.is_void:
                self.void += 1
                break
            sampled = self._sampled(plan)
            if self.first_stage is not None:
                self.first_stage.begin(plan.output, sampled)
            self._inflight.append((plan, sampled))
            self.sizes.append((self._decodes(plan), len(self._decoding())))
        if self._inflight:
            self.finish()

    def finish(self) -> None:
        plan, sampled = self._inflight.popleft()
        names = list(plan.output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for output in self.scheduler.finish_step(plan, result):
            self.answers.setdefault(output.request_id, []).extend(output.new_token_ids)

    def run(self) -> None:
        """Until all tasks have ended."""
        for _ in range(10_000):
            if not self.scheduler.requests and not self._inflight:
                return
            self.turn()
        raise AssertionError(f"never over: {self.scheduler.requests}")

    @property
    def prompts(self) -> list[Any]:
        """Running tasks without a token."""
        return [each for each in self.scheduler.running if not each.num_output_tokens]

    @property
    def inflight(self) -> list[StepPlan]:
        return [plan for plan, _ in self._inflight]

    def _sampled(self, plan: StepPlan) -> dict[str, list[int]]:
        """A token is the number of those before it, as far as this step has computed."""
        output, cached = plan.output, plan.output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        ends = {name: starts[name] + count for name, count in output.num_scheduled_tokens.items()}
        requests = self.scheduler.requests
        return {
            name: [end] if end >= requests[name].num_tokens else [] for name, end in ends.items()
        }

    def _decoding(self) -> list[Any]:
        return [
            each
            for each in self.scheduler.running
            if each.num_output_tokens and each.num_tokens - each.num_computed_tokens <= 1
        ]

    def _decodes(self, plan: StepPlan) -> int:
        decoding = {each.request_id for each in self._decoding()}
        return len(decoding.intersection(plan.output.num_scheduled_tokens))


def prompt_of(number: int, length: int) -> list[int]:
    return [5 + number * 300 + place for place in range(length)]


def expected(length: int) -> list[int]:
    return list(range(length, length + TOKENS))


def adopted(
    base: VllmConfig, hasher: Any, count: int, kind: type[ModeScheduler] = ModeScheduler
) -> ModeScheduler:
    """A scheduler that goes on with this number of decodes, which another has begun."""
    old = scheduler_of(base, *EVERY_PAGE, pages=PAGES)
    prompts = {f"t{number}": prompt_of(number, 40) for number in range(count)}
    for name, prompt in prompts.items():
        old.add_task(fresh(name, prompt, hasher), [])
    while any(not request.num_output_tokens for request in old.requests.values()):
        step(old, token=40)
    new, states = scheduler_of(base, *EVERY_PAGE, pages=PAGES, kind=kind), states_of(old)
    new.use_v2_model_runner = kind is AsyncModeScheduler
    new.withdraw()
    moved = []
    for number, (name, state) in enumerate(states.items()):
        blocks = np.arange(3) + WIDTH + 3 * number
        request = restored(name, prompts[name], state, hasher)
        moved.append((request, blocks[: -(-state.computed // 32)]))
    new.adopt(moved, [], np.array(EVERY_PAGE), np.array([]))
    return new


@pytest.mark.parametrize("count", [TASKS, TASKS - 3])
def test_decodes_that_come_at_once_are_soon_balanced(
    base: VllmConfig, hasher: Any, count: int
) -> None:
    """The issue's promise, from the first round until all tasks have ended, one after the other."""
    pipeline = Pipeline(adopted(base, hasher, count))
    assert len(pipeline.scheduler.requests) == count
    pipeline.run()
    (first, *later) = pipeline.sizes
    assert first == (count, count), "the first step has all"
    near = [abs(decodes - ceil(decoding / STAGES)) <= 1 for decodes, decoding in later]
    print(f"{count} tasks: {sum(near)} of {len(near)} steps have their share")
    assert len(near) >= 3 * TOKENS
    assert sum(near) >= 0.9 * len(near)
    whole = [decodes for decodes, decoding in later if decoding == count]
    assert len(whole) >= 20
    settled = whole[2 * STAGES :]
    assert max(settled) - min(settled) <= 1, "shares differ by one while nobody ends"


def test_tasks_that_arrive_beside_decodes_are_balanced_too(base: VllmConfig, hasher: Any) -> None:
    pipeline = Pipeline(adopted(base, hasher, 16))
    for number in range(16, 32):
        pipeline.scheduler.add_task(fresh(f"t{number}", prompt_of(number, 40), hasher), [])
    while pipeline.scheduler.get_request_counts()[1] or pipeline.prompts:
        pipeline.turn()
    begins = len(pipeline.sizes)
    for _ in range(10 * STAGES):
        pipeline.turn()
    settled = pipeline.sizes[begins + 3 * STAGES :]
    assert {decoding for _, decoding in settled} == {32}
    assert {decodes for decodes, _ in settled} == {8}
    pipeline.run()
    assert all(answer[-1] == 40 + TOKENS - 1 for answer in pipeline.answers.values())


def test_no_more_tasks_run_than_the_runner_has_room_for(base: VllmConfig, hasher: Any) -> None:
    """Hidden decodes are among the running ones."""
    scheduler = adopted(base, hasher, 12)
    scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = 16
    pipeline = Pipeline(scheduler)
    for number in range(12, 40):
        scheduler.add_task(fresh(f"t{number}", prompt_of(number, 40), hasher), [])
    most = 0
    while scheduler.requests:
        pipeline.turn()
        most = max(most, len(scheduler.running))
        assert (scheduler.max_num_running_reqs, scheduler.max_num_active_reqs) == (16, 16)
    assert most == 16
    assert len(pipeline.answers) == 40
    assert all(pipeline.answers[f"t{number}"] == expected(40) for number in range(12, 40))


def test_running_tasks_stay_in_their_order(base: VllmConfig, hasher: Any) -> None:
    """vLLM preempts the last of them: the one that came last."""
    pipeline = Pipeline(adopted(base, hasher, 11))
    for number in range(11, 30):
        pipeline.scheduler.add_task(fresh(f"t{number}", prompt_of(number, 40), hasher), [])
    arrived = list(pipeline.scheduler.requests)
    while pipeline.scheduler.requests:
        pipeline.turn()
        running = [each.request_id for each in pipeline.scheduler.running]
        assert running == sorted(running, key=arrived.index)
    assert pipeline.scheduler.counted().preemptions == 0


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("lengths", [(60, 60, 60, 60), (20, 31, 64, 90, 33, 5)])
def test_no_token_comes_twice_where_tasks_are_preempted_beside_steps_in_flight(
    base: VllmConfig, hasher: Any, stages: int, lengths: tuple[int, ...]
) -> None:
    """vLLM preempts nobody whose blocks a step still writes: it waits for that step."""
    scheduler = scheduler_of(base, 1, 2)
    pipeline = Pipeline(scheduler, stages)
    for number, length in enumerate(lengths):
        scheduler.add_task(fresh(f"t{number}", prompt_of(number, length), hasher), [])
    pipeline.run()
    assert scheduler.counted().preemptions > 0
    assert pipeline.preempted_beside > 0, "none was preempted while steps were in flight"
    assert pipeline.answers == {
        f"t{number}": expected(length) for number, length in enumerate(lengths)
    }
    assert scheduler.blocks_free == scheduler.blocks_total


def test_steps_in_flight_that_will_never_end_hold_nothing(base: VllmConfig, hasher: Any) -> None:
    """The formation is lost: tasks go on elsewhere, from what the finished steps gave."""
    pipeline = Pipeline(adopted(base, hasher, 16))
    for _ in range(2 * STAGES):
        pipeline.turn()
    scheduler = pipeline.scheduler
    assert len(pipeline.inflight) == STAGES - 1
    scheduler.forget_steps()
    taken = scheduler.take_back(list(scheduler.requests))
    had = {name: tokens.count(40) for name, tokens in taken.items()}
    assert {name: tokens[had[name] :] for name, tokens in taken.items()} == pipeline.answers
    assert scheduler.blocks_free == scheduler.blocks_total
    assert not scheduler.frees_after_step


def test_steps_that_nobody_computes_take_no_entries_with_them(
    base: VllmConfig, hasher: Any
) -> None:
    """Blocks enter the directory of the group when the step that they were counted for is over."""
    scheduler, entries = scheduler_of(base, 1, 2), CountedEntries()
    scheduler.entries = cast(BlockEntries, entries)
    pipeline = Pipeline(scheduler)
    for number in range(4):
        scheduler.add_task(fresh(f"t{number}", prompt_of(number, 60), hasher), [])
    pipeline.run()
    assert pipeline.void > 0, "waiting tasks found no room beside those in flight"
    assert len(entries.over) >= TOKENS
    assert entries.planned == entries.over


class CountedEntries:
    """Which steps blocks are counted for, and which are over."""

    def __init__(self) -> None:
        self.planned: list[object] = []
        self.over: list[object] = []

    def step_is_planned(self, plan: object, *, computes: bool) -> None:
        self.planned.append(plan)

    def of_finished_step(self, plan: object, *, is_void: bool) -> nullcontext[None]:
        assert not is_void
        self.over.append(plan)
        return nullcontext()


# ---------------------------------------------------------------------- tokens that devices pass on


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_tokens_are_there_in_each_step_that_reads_them(
    base: VllmConfig, hasher: Any, stages: int, count: int
) -> None:
    """Beside decodes of another group, prompts come in several steps; one task ends in mid-answer.

    Now and then the group is left and formed again.
    """
    scheduler = adopted(base, hasher, count, AsyncModeScheduler)
    stage = FirstStage()
    pipeline = Pipeline(scheduler, stages, first_stage=stage)
    lengths = {f"p{number}": 40 * number + 5 for number in range(1, 6)}
    for turn in range(10_000):
        if turn % 7 == 3 and lengths:
            name, length = lengths.popitem()
            scheduler.add_task(fresh(name, prompt_of(9, length), hasher), [])
        if turn == 20:
            scheduler.take_back(["p5"])
        if turn % 23 == 22:
            while pipeline.inflight:
                pipeline.finish()
            stage.enter()
        if not scheduler.requests and not pipeline.inflight:
            break
        pipeline.turn()
    for number in range(1, 5):
        assert pipeline.answers[f"p{number}"] == expected(40 * number + 5)
    assert all(pipeline.answers[f"t{n}"][-1] == 40 + TOKENS - 1 for n in range(count))
    assert stage.received > TOKENS, "devices passed most of them on"
    assert stage.longest <= PIECES, "the link has room"


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("lengths", [(60, 60, 60, 60), (20, 31, 64, 90, 33, 5)])
def test_tokens_are_right_where_tasks_are_preempted(
    base: VllmConfig, hasher: Any, stages: int, lengths: tuple[int, ...]
) -> None:
    scheduler = scheduler_of(base, 1, 2, kind=AsyncModeScheduler)
    scheduler.use_v2_model_runner = True
    pipeline = Pipeline(scheduler, stages, first_stage=FirstStage())
    for number, length in enumerate(lengths):
        scheduler.add_task(fresh(f"t{number}", prompt_of(number, length), hasher), [])
    pipeline.run()
    assert scheduler.counted().preemptions > 0
    assert pipeline.answers == {
        f"t{number}": expected(length) for number, length in enumerate(lengths)
    }
    assert scheduler.blocks_free == scheduler.blocks_total


@pytest.mark.parametrize("count", [TASKS, TASKS - 3])
def test_decodes_ahead_of_their_tokens_are_balanced(
    base: VllmConfig, hasher: Any, count: int
) -> None:
    pipeline = Pipeline(adopted(base, hasher, count, AsyncModeScheduler), first_stage=FirstStage())
    for _ in range(12 * STAGES):
        pipeline.turn()
    sizes = pipeline.sizes[2 * STAGES :]
    near = [abs(decodes - ceil(decoding / STAGES)) <= 1 for decodes, decoding in sizes]
    assert sum(near) >= 0.9 * len(near)
    pipeline.run()
    assert all(answer[-1] == 40 + TOKENS - 1 for answer in pipeline.answers.values())
