"""All unfinished tasks: who holds each, in which order the rest are taken, how each ends.

Invariant: every task is in exactly one state and ends exactly once; an ended task is remembered
for a while, so that late and repeated messages about it do no harm. Messages about a placement
count only if they name its attempt. Called by the core, which hands in messages and carries out
the effects that come back.

Placing goes through the queue in order. A task without room claims the group that could hold it
and is the least loaded, so that later tasks do not take the room it waits for; `LOOK_AHEAD_TASKS`
such tasks close their tier for the round.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from comm_pool.layout import Rank
from coordinator.events import Effect, ToGateway, ToRank
from coordinator.placement import Loads, OpenGroup
from coordinator.protocol.messages import (
    Carry,
    Drop,
    EndCause,
    GiveBack,
    HeldTask,
    Place,
    RankHello,
    Resubmit,
    ReturnCause,
    Submit,
    TaskEnded,
    TaskFailed,
    TaskId,
    TaskProgress,
    TaskReturned,
    Tier,
)
from coordinator.tasks import HELD, State, Task, TaskQueue

LOOK_AHEAD_TASKS = 32
"""Tasks without room that are looked behind, per tier and round."""

ENDED_REMEMBERED = 16_384
"""Ended tasks that are remembered; more than can be under way in messages."""

ATTEMPTS_APART = 1_000
"""More attempts of one task than one coordinator makes; the next one counts on behind them."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Times in milliseconds."""

    queue_tasks_max: int
    ageing_ms: int
    pause_limit_ms: int
    claim_ms: int


@dataclass(slots=True)
class _Ended:
    """What is left of a task that ended."""

    cause: EndCause
    attempt: int
    arrival: int
    gateway: str
    leader: Rank | None
    """Who pushed its last tokens; None once the gateway has them all, or needs none."""
    failure: TaskFailed | None = None


class TaskPool:
    """The task pool of a cell; see the module for its rules."""

    __slots__ = (
        "_arrivals",
        "_by_gateway",
        "_carried",
        "_deadlines",
        "_ended",
        "_limits",
        "_loads",
        "_queue",
        "_tasks",
        "_unclaimed",
        "context_tokens_max",
        "recovering",
    )

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._tasks: dict[TaskId, Task] = {}
        self._by_gateway: dict[str, set[TaskId]] = {}
        self._queue = TaskQueue(limits.ageing_ms)
        self._loads = Loads()
        self._ended: OrderedDict[TaskId, _Ended] = OrderedDict()
        self._unclaimed: dict[TaskId, int] = {}
        """Tasks that no gateway has asked for since it, or this coordinator, came: until when."""
        self._deadlines: list[tuple[int, TaskId]] = []
        self._arrivals = 0
        self._carried: Counter[Carry] = Counter()
        self.context_tokens_max = 0
        """The longest context of any group that the ranks could form; 0 is unknown."""
        self.recovering = True
        """Ranks are still to tell what they hold; nothing is placed."""

    def __len__(self) -> int:
        """Return the number of unfinished tasks."""
        return len(self._tasks)

    def __contains__(self, task: object) -> bool:
        """Say whether the task is known and has not ended."""
        return task in self._tasks

    def state_of(self, task: TaskId) -> State | None:
        """Return the task's state; None if it is not known or has ended."""
        found = self._tasks.get(task)
        return found.state if found else None

    @property
    def queued(self) -> int:
        """The number of tasks that wait for a group."""
        return len(self._queue)

    def unfinished(self) -> Iterable[Task]:
        """Return the unfinished tasks, to be looked at only."""
        return self._tasks.values()

    def take_carried(self) -> Counter[Carry]:
        """Return how many tasks were paused and recomputed since the last call."""
        carried, self._carried = self._carried, Counter()
        return carried

    # ------------------------------------------------------------------ from gateways

    def submit(self, message: Submit, now_ms: int) -> list[Effect]:
        """Take a task in, or take note that its gateway still wants it."""
        task = self._tasks.get(message.header.task)
        if task is None:
            ended = self._ended.get(message.header.task)
            return self._accept(message, now_ms) if ended is None else self._revive(message, now_ms)
        self._unclaimed.pop(task.id, None)
        if task.payload is None:
            task.payload = message.payload
            task.header = message.header
        if task.state is not State.ASKED or self.recovering:
            return []
        if message.attempt < task.attempt:
            # It was sent before the gateway read the question: tokens may be under way behind it.
            return [_ask(task)]
        task.tokens = message.delivered_tokens
        task.generated = len(task.tokens)
        self._enter(task, State.QUEUED, now_ms)
        return []

    def cancel(self, task: TaskId, now_ms: int) -> list[Effect]:
        """End a task that nobody waits for."""
        found = self._tasks.get(task)
        return self._end(found, EndCause.CANCELLED, now_ms) if found else []

    def done(self, task: TaskId, now_ms: int) -> list[Effect]:
        """End a task whose last token its gateway has."""
        found = self._tasks.get(task)
        effects = self._end(found, EndCause.FINISHED, now_ms) if found else []
        if ended := self._ended.get(task):
            ended.leader = None
        return effects

    def gateway_opened(self, gateway: str, now_ms: int) -> None:
        """Expect the gateway to submit all that it still wants."""
        for task in self._by_gateway.get(gateway, ()):
            self._unclaimed[task] = now_ms + self._limits.claim_ms

    def gateway_gone(self, gateway: str, now_ms: int) -> list[Effect]:
        """End all tasks of a gateway that does not come back."""
        gone = sorted(self._by_gateway.get(gateway, ()))
        return [effect for task in gone for effect in self.cancel(task, now_ms)]

    # ------------------------------------------------------------------ from ranks

    def ended(self, rank: Rank, message: TaskEnded, now_ms: int) -> list[Effect]:
        """Take a leader's word that a task ended."""
        task = self._current(rank, message.task, message.attempt)
        if task is None:
            return []
        match message.cause:
            case EndCause.FINISHED | EndCause.CANCELLED:
                return self._end(task, message.cause, now_ms, is_held=False)
            case EndCause.REFUSED | EndCause.FAILED:
                code = "server_error" if message.cause is EndCause.FAILED else "invalid_request"
                return self._fail(task, code, message.message, now_ms, is_held=False)

    def returned(self, rank: Rank, message: TaskReturned, now_ms: int) -> list[Effect]:
        """Queue a task again that its leader gave back, behind the tokens it has."""
        task = self._current(rank, message.task, message.attempt)
        if task is None:
            return []
        if message.cause is ReturnCause.RECOMPUTE and task.state is not State.RETURNING:
            self._carried[Carry.RECOMPUTE] += 1
        task.tokens = message.generated_tokens
        task.generated = len(task.tokens)
        if task.payload is None:
            # Its gateway was not heard yet, so it cannot be placed.
            return self._doubt(task, now_ms)
        self._enter(task, State.QUEUED, now_ms)
        return []

    def progress(self, rank: Rank, items: Iterable[TaskProgress], now_ms: int) -> None:
        """Take how far a leader's tasks are; only from its newest report."""
        for item in items:
            task = self._tasks.get(item.task)
            if task is None or task.leader != rank or task.state not in HELD:
                continue
            task.generated = max(task.generated, item.generated)
            wanted = State.PAUSED if item.paused else State.PLACED
            if task.state is not State.RETURNING and task.state is not wanted:
                self._carried[Carry.PAUSE] += item.paused
                self._enter(task, wanted, now_ms)
            elif task.state is State.PLACED:
                self._loads.set(rank, task.id, task.context_tokens)

    def reconcile(self, hello: RankHello, now_ms: int) -> list[Effect]:
        """Compare what a rank holds with what it is believed to hold; its session is new."""
        effects: list[Effect] = []
        held = {each.header.task: each for each in hello.held}
        for task in [task for task in self._tasks.values() if task.leader == hello.rank]:
            if task.state in HELD and task.id not in held:
                effects += self._doubt(task, now_ms)
        for each in hello.held:
            effects += self._hold(hello.rank, each, now_ms)
        return effects

    def lost(self, rank: Rank, now_ms: int) -> list[Effect]:
        """Take up again what a lost rank led, behind what the gateways have of it."""
        effects: list[Effect] = []
        for task in [task for task in self._tasks.values() if task.leader == rank]:
            if task.state in HELD:
                # The rank may live behind a broken network, and come back with the task.
                effects.append(ToRank(rank, Drop(task.id)))
                effects += self._doubt(task, now_ms)
        for task_id, ended in self._ended.items():
            if ended.leader == rank:
                # Its last tokens may have been lost on their way.
                effects.append(ToGateway(ended.gateway, Resubmit(task_id, ended.attempt + 1)))
        return effects

    # ------------------------------------------------------------------ time and placing

    def recovered(self, now_ms: int) -> list[Effect]:
        """All ranks that live have told what they hold."""
        self.recovering = False
        for task in self._tasks.values():
            if task.payload is None:
                self._unclaimed[task.id] = now_ms + self._limits.claim_ms
        return [_ask(task) for task in self._tasks.values() if task.state is State.ASKED]

    def tick(self, now_ms: int) -> list[Effect]:
        """Let time pass: deadlines, pauses, tasks that nobody claims."""
        effects: list[Effect] = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, task_id = heappop(self._deadlines)
            if task := self._tasks.get(task_id):
                message = f"not finished within its {task.header.deadline_ms} ms."
                effects += self._fail(task, "deadline_exceeded", message, now_ms)
        for task in self._tasks.values():
            limit_ms = task.since_ms + self._limits.pause_limit_ms
            if task.state is State.PAUSED and now_ms >= limit_ms and task.leader is not None:
                effects.append(ToRank(task.leader, GiveBack(task.id)))
                self._enter(task, State.RETURNING, now_ms)
        for task_id in [task for task, until_ms in self._unclaimed.items() if now_ms >= until_ms]:
            effects += self.cancel(task_id, now_ms)
        return effects

    def place(self, groups: Iterable[OpenGroup], now_ms: int) -> list[Effect]:
        """Give tasks to groups that have room, in order."""
        free = [group for group in groups if self._loads.tasks(group.leader) < group.max_tasks]
        closed: set[Tier] = set()
        blocked: Counter[Tier] = Counter()
        chosen: list[tuple[Task, OpenGroup]] = []
        for task_id in self._queue.in_order(now_ms, closed):
            if not free:
                break
            task = self._tasks[task_id]
            group = self._loads.least_loaded(
                group for group in free if self._loads.has_room(group, task)
            )
            if group is not None:
                self._loads.set(group.leader, task.id, task.context_tokens)
                chosen.append((task, group))
                continue
            claimed = self._loads.least_loaded(group for group in free if group.could_hold(task))
            free = [group for group in free if group is not claimed]
            blocked[task.header.tier] += 1
            if blocked[task.header.tier] >= LOOK_AHEAD_TASKS:
                closed.add(task.header.tier)
        return [self._place(task, group, now_ms) for task, group in chosen]

    def recheck_context(self, now_ms: int) -> list[Effect]:
        """Fail queued tasks that became too long for every group that can still be formed."""
        limit = self.context_tokens_max
        too_long = [
            task
            for task in self._tasks.values()
            if task.state is State.QUEUED and limit and task.context_tokens_max > limit
        ]
        return [effect for task in too_long for effect in self._refuse_context(task, now_ms)]

    def integrity(self) -> None:
        """Assert the invariant; costs O(tasks)."""
        queued = {task.id for task in self._tasks.values() if task.state is State.QUEUED}
        assert set(self._queue.in_order(0, ())) == queued, "queue and task states differ."
        assert len(self._queue) == len(queued), "a task is queued twice."
        placed = {
            (task.leader, task.id) for task in self._tasks.values() if task.state is State.PLACED
        }
        assert self._loads.counted() == placed, "loads and task states differ."
        for task in self._tasks.values():
            assert task.id not in self._ended, f"task {task.id} has ended and has not."
            assert (task.leader is not None) == (task.state in HELD), f"task {task.id}: leader."
            assert task.id in self._by_gateway[task.header.gateway], f"task {task.id}: gateway."
            assert task.payload is not None or task.state is not State.QUEUED, "no payload."
        assert self._unclaimed.keys() <= self._tasks.keys(), "an ended task waits for its claim."
        count = sum(len(tasks) for tasks in self._by_gateway.values())
        assert count == len(self._tasks), "gateways have tasks that do not exist."

    # ------------------------------------------------------------------ transitions

    def _accept(self, message: Submit, now_ms: int) -> list[Effect]:
        header = message.header
        task = Task(header, self._arrivals, now_ms, State.QUEUED, now_ms, message.payload)
        task.tokens = message.delivered_tokens
        task.generated = len(task.tokens)
        task.attempt = message.attempt
        limit = self.context_tokens_max
        if limit and task.context_tokens_max > limit:
            return [_refusal(task, *self._context_refusal(task))]
        if len(self._queue) >= self._limits.queue_tasks_max and not self.recovering:
            message_text = f"{len(self._queue)} tasks are waiting already."
            return [_refusal(task, "queue_full", message_text)]
        self._arrivals += 1
        self._add(task)
        if self.recovering:
            # A rank that is not heard yet may hold it, or have run it before it was lost.
            task.attempt += ATTEMPTS_APART
            task.state = State.ASKED
        else:
            self._queue.put(task)
        return []

    def _revive(self, message: Submit, now_ms: int) -> list[Effect]:
        """A gateway submits a task that ended."""
        ended = self._ended[message.header.task]
        if ended.failure is not None:
            return [ToGateway(ended.gateway, ended.failure)]
        if ended.leader is None or message.attempt <= ended.attempt:
            # Cancelled, or its last tokens are on their way.
            return []
        del self._ended[message.header.task]
        effects = self._accept(message, now_ms)
        return effects

    def _add(self, task: Task) -> None:
        self._tasks[task.id] = task
        self._by_gateway.setdefault(task.header.gateway, set()).add(task.id)
        if task.header.deadline_ms:
            heappush(self._deadlines, (task.arrived_ms + task.header.deadline_ms, task.id))

    def _current(self, rank: Rank, task: TaskId, attempt: int) -> Task | None:
        """Return the task if `rank` holds it and `attempt` is its current placement."""
        found = self._tasks.get(task)
        if found is None or found.state not in HELD:
            return None
        return found if found.leader == rank and found.attempt == attempt else None

    def _enter(self, task: Task, state: State, now_ms: int) -> None:
        """Change the task's state, and with it the queue and the loads."""
        if task.state is State.QUEUED:
            self._queue.remove(task)
        if task.leader is not None:
            self._loads.remove(task.leader, task.id)
        task.state = state
        task.since_ms = now_ms
        if state not in HELD:
            task.leader = None
        if state is State.QUEUED:
            self._queue.put(task)
        if state is State.PLACED and task.leader is not None:
            self._loads.set(task.leader, task.id, task.context_tokens)

    def _place(self, task: Task, group: OpenGroup, now_ms: int) -> Effect:
        assert task.payload is not None, f"task {task.id} is placed without its payload."
        task.attempt += 1
        task.leader = group.leader
        self._enter(task, State.PLACED, now_ms)
        place = Place(task.header, task.attempt, group.binding, task.payload, task.tokens)
        return ToRank(group.leader, place)

    def _hold(self, rank: Rank, held: HeldTask, now_ms: int) -> list[Effect]:
        """Believe a rank that it holds a task, unless more is known."""
        task = self._tasks.get(held.header.task)
        if task is None:
            if held.header.task in self._ended:
                return [ToRank(rank, Drop(held.header.task))]
            task = Task(held.header, self._arrivals, now_ms, State.ASKED, now_ms)
            self._arrivals += 1
            self._add(task)
            self._unclaimed[task.id] = now_ms + self._limits.claim_ms
        elif not self._is_newer(task, rank, held):
            return [ToRank(rank, Drop(task.id))]
        effects: list[Effect] = []
        if task.leader is not None and task.leader != rank:
            effects.append(ToRank(task.leader, Drop(task.id)))
        task.attempt = held.attempt
        task.generated = max(task.generated, held.generated)
        self._enter(task, State.ASKED, now_ms)
        task.leader = rank
        self._enter(task, State.PAUSED if held.paused else State.PLACED, now_ms)
        return effects

    def _is_newer(self, task: Task, rank: Rank, held: HeldTask) -> bool:
        """Say whether what the rank holds is the task's newest attempt."""
        if task.state in HELD:
            is_same = task.leader == rank and task.attempt == held.attempt
            return is_same or (self.recovering and held.attempt > task.attempt)
        return task.state is State.ASKED and self.recovering

    def _doubt(self, task: Task, now_ms: int) -> list[Effect]:
        """Nobody here knows how far the task got: ask its gateway, in an attempt of its own."""
        self._enter(task, State.ASKED, now_ms)
        task.attempt += 1
        return [] if self.recovering else [_ask(task)]

    def _end(
        self, task: Task, cause: EndCause, now_ms: int, *, is_held: bool = True
    ) -> list[Effect]:
        """Forget a task; its leader is told to drop it if it may still hold it."""
        leader = task.leader
        self._enter(task, State.ASKED, now_ms)
        del self._tasks[task.id]
        self._by_gateway[task.header.gateway].discard(task.id)
        if not self._by_gateway[task.header.gateway]:
            del self._by_gateway[task.header.gateway]
        self._unclaimed.pop(task.id, None)
        pushed_by = leader if cause is EndCause.FINISHED else None
        self._ended[task.id] = _Ended(
            cause, task.attempt, task.arrival, task.header.gateway, pushed_by
        )
        while len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        return [ToRank(leader, Drop(task.id))] if is_held and leader is not None else []

    def _fail(
        self, task: Task, code: str, message: str, now_ms: int, *, is_held: bool = True
    ) -> list[Effect]:
        effects = self._end(task, EndCause.FAILED, now_ms, is_held=is_held)
        failure = TaskFailed(task.id, code, message)
        self._ended[task.id].failure = failure
        return [*effects, ToGateway(task.header.gateway, failure)]
