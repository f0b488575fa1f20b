"""Whatever happens to tasks, each is in one place, runs in one attempt, and ends once.

The machine plays gateways and ranks that say anything at any time, in and out of turn. It keeps a
book of who really holds what; the pool must never place a task that someone still holds.
"""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from comm_pool.layout import Group, Mode, Rank
from coordinator.model.events import Effect, ToGateway, ToRank
from coordinator.model.settings import PoolLimits, QueueBounds, TierBounds
from coordinator.protocol.messages.gateway import Resubmit, Submit, TaskFailed
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.rank import Drop, GiveBack, Place, RankHello
from coordinator.protocol.messages.tasks import (
    HeldTask,
    TaskEnded,
    TaskHeader,
    TaskProgress,
    TaskReturned,
)
from coordinator.protocol.terms import Binding, EndCause, ReturnCause, TaskId, Tier
from coordinator.tasks.placement import OpenGroup
from coordinator.tasks.task import State
from coordinator.tasks.task_pool import TaskPool

TASKS = [TaskId(name) for name in "abc"]
RANKS = [Rank(rank) for rank in range(3)]
BOUNDS = QueueBounds(2, {Tier.STANDARD: TierBounds(1, 70), Tier.BATCH: TierBounds(wait_ms=90)})
tasks = st.sampled_from(TASKS)
ranks = st.sampled_from(RANKS)


def group(rank: Rank) -> OpenGroup:
    return OpenGroup(Binding(Group((rank,), Mode.DP), 1), 2, 6, 16)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.pool = TaskPool(PoolLimits(queue=BOUNDS, ageing_ms=50, pause_limit_ms=30, claim_ms=40))
        self.pool.context_tokens_max = 90
        self.pool.recovered(0)
        self.held: dict[TaskId, tuple[Rank, Place, list[int]]] = {}
        """Who runs a task, and with which tokens."""
        self.pushed: dict[TaskId, list[int]] = {}
        """Tokens that the gateway has."""
        self.fence: dict[TaskId, int] = {}
        self.open: set[TaskId] = set()
        self.attempts: dict[TaskId, int] = {}
        self.draw = 0

    def perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToRank(rank, Place() as place):
                    self.take_place(rank, place)
                case ToRank(rank, Drop(task)):
                    if task in self.held and self.held[task][0] == rank:
                        del self.held[task]
                case ToRank(rank, GiveBack(task)):
                    if task in self.held:
                        self.give_back(task)
                case ToGateway(_, TaskFailed(task)):
                    self.open.discard(task)
                case ToGateway(_, Resubmit(task, attempt)):
                    self.answer(task, attempt)
                case _:
                    raise AssertionError(f"unexpected {effect}")

    def take_place(self, rank: Rank, place: Place) -> None:
        task = place.header.task
        assert task not in self.held, f"{task} is placed while rank {self.held[task][0]} runs it"
        assert place.attempt > self.attempts.get(task, 0), "attempts grow"
        assert list(place.generated_tokens) == self.pushed[task], "it goes on from other tokens"
        self.attempts[task] = place.attempt
        self.held[task] = (rank, place, list(place.generated_tokens))

    def answer(self, task: TaskId, attempt: int) -> None:
        """The gateway fences and submits again; or it has nothing more to ask for."""
        self.fence[task] = max(attempt, self.fence.get(task, 0))
        if task in self.open:
            self.submit_again(task)
        else:
            self.perform(self.pool.release(task))

    def submission(self, task: TaskId, tier: Tier = Tier.STANDARD, deadline_ms: int = 0) -> Submit:
        tenant = "one" if task < "c" else "other"
        header = TaskHeader(task, "g", "tcp://g", 10, 20, tier, deadline_ms, tenant)
        void = self.fence.get(task, 0)
        known = max(void, self.attempts.get(task, 0))
        tokens = tuple(self.pushed.get(task, ()))
        return Submit(header, b"payload", tokens, known, void_attempt=void)

    def submit_again(self, task: TaskId) -> None:
        self.perform(self.pool.submit(self.submission(task), self.now_ms))

    def give_back(self, task: TaskId) -> None:
        rank, place, tokens = self.held.pop(task)
        returned = TaskReturned(task, place.attempt, ReturnCause.RECOMPUTE, tuple(tokens))
        self.perform(self.pool.returned(rank, returned, self.now_ms))

    @rule(task=tasks, tier=st.sampled_from(Tier), deadline_ms=st.sampled_from([0, 0, 60]))
    def submit(self, task: TaskId, tier: Tier, deadline_ms: int) -> None:
        if task in self.open:
            self.submit_again(task)
        elif task not in self.pushed:
            self.open.add(task)
            self.pushed[task] = []
            submission = self.submission(task, tier, deadline_ms)
            self.perform(self.pool.submit(submission, self.now_ms))

    @rule(chosen=st.sets(ranks))
    def place(self, chosen: set[Rank]) -> None:
        self.perform(self.pool.place([group(rank) for rank in sorted(chosen)], self.now_ms))

    @rule(task=tasks)
    def step(self, task: TaskId) -> None:
        if task in self.held:
            _, place, tokens = self.held[task]
            self.draw += 1
            tokens.append(self.draw)
            if place.attempt > self.fence.get(task, 0):
                self.pushed[task] = list(tokens)

    @rule(task=tasks, paused=st.booleans())
    def progress(self, task: TaskId, paused: bool) -> None:
        if task in self.held:
            rank, _, tokens = self.held[task]
            self.pool.progress(rank, [TaskProgress(task, len(tokens), paused)], self.now_ms)

    @rule(task=tasks)
    def park(self, task: TaskId) -> None:
        if task in self.held:
            self.give_back(task)

    @rule(task=tasks, cause=st.sampled_from(EndCause), told_twice=st.booleans())
    def end(self, task: TaskId, cause: EndCause, told_twice: bool) -> None:
        if task not in self.held:
            return
        rank, place, tokens = self.held.pop(task)
        ended = TaskEnded(task, place.attempt, cause, len(tokens))
        was_known = task in self.pool.tasks
        self.perform(self.pool.ended(rank, ended))
        assert not was_known or task not in self.pool.tasks
        if told_twice:
            self.perform(self.pool.ended(rank, ended))
        if cause is EndCause.FINISHED and place.attempt > self.fence.get(task, 0):
            self.open.discard(task)
            self.perform(self.pool.release(task))

    @rule(task=tasks, rank=ranks, attempt=st.integers(0, 3))
    def say_nonsense(self, task: TaskId, rank: Rank, attempt: int) -> None:
        if task in self.held and (rank, attempt) == (
            self.held[task][0],
            self.held[task][1].attempt,
        ):
            return
        ended = TaskEnded(task, attempt, EndCause.FINISHED, 0)
        assert self.pool.ended(rank, ended) == []
        returned = TaskReturned(task, attempt, ReturnCause.STALE, (666,))
        assert self.pool.returned(rank, returned, self.now_ms) == []

    @rule(task=tasks)
    def cancel(self, task: TaskId) -> None:
        self.open.discard(task)
        self.perform(self.pool.release(task))
        assert task not in self.pool.tasks

    @rule(rank=ranks)
    def lose(self, rank: Rank) -> None:
        for task in [task for task, (holder, _, _) in self.held.items() if holder == rank]:
            del self.held[task]
        self.perform(self.pool.lost(rank, self.now_ms))

    @rule(rank=ranks, forgets=st.booleans())
    def open_session(self, rank: Rank, forgets: bool) -> None:
        own = [entry for entry in self.held.values() if entry[0] == rank]
        if forgets:
            for _, place, _ in own[:1]:
                del self.held[place.header.task]
            own = own[1:]
        held = tuple(
            HeldTask(place.header, place.attempt, place.binding.group, len(tokens), paused=False)
            for _, place, tokens in own
        )
        hello = RankHello(PROTOCOL_VERSION, rank, 1, 1, "cpu", (1,), 2, 90, 16, 8, 7, held)
        self.perform(self.pool.reconcile(hello, self.now_ms))

    @rule()
    def gateway_returns(self) -> None:
        self.pool.gateway_opened("g", self.now_ms)
        for task in sorted(self.open):
            self.submit_again(task)

    @rule()
    def gateway_is_given_up(self) -> None:
        self.perform(self.pool.gateway_gone("g"))
        assert len(self.pool.tasks) == 0
        assert not self.held

    @rule(passed_ms=st.integers(1, 50))
    def wait(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        self.perform(self.pool.tick(self.now_ms))

    @invariant()
    def each_task_is_in_one_place(self) -> None:
        self.pool.integrity()
        for task in self.pool.tasks:
            assert task.state is not State.QUEUED or task.id not in self.held
            if task.leader is not None:
                assert task.id in self.held
                assert self.held[task.id][0] == task.leader

    @invariant()
    def the_queue_is_bounded(self) -> None:
        # What was admitted once is queued again however long the queue is.
        assert len(self.pool.tasks.queue) <= len(TASKS)


TestTaskPool = PoolMachine.TestCase
TestTaskPool.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


class LongPoolMachine(PoolMachine):
    """The same, for many more examples."""


TestTaskPoolForLong = LongPoolMachine.TestCase
TestTaskPoolForLong.settings = settings(max_examples=1_000, stateful_step_count=50, deadline=None)
pytest.mark.long(TestTaskPoolForLong)
