"""All unfinished tasks: which leader holds each, in which order the rest go, how each ends.

Invariant: every task is in exactly one state and ends exactly once. Ended tasks are remembered for
a while, so late and repeated messages do no harm. Messages about a placement count only if they
name its attempt. The core passes messages in and carries out the returned effects.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from comm_pool.layout import Rank
from coordinator.model.events import Effect, ToGateway, ToRank, warning
from coordinator.model.settings import PoolLimits, QueueBounds
from coordinator.protocol.messages.gateway import (
    Resubmit,
    Submit,
    TaskFailed,
    Withdrawn,
    cells_before,
)
from coordinator.protocol.messages.rank import Drop, GiveBack, RankHello
from coordinator.protocol.messages.tasks import (
    Adopted,
    HeldTask,
    TaskEnded,
    TaskProgress,
    TaskReturned,
)
from coordinator.protocol.terms import Carry, EndCause, ReturnCause, TaskId, Tier
from coordinator.tasks.displacement import DISPLACED_FOR_MAX, LOOK_EVERY_MS, displaced
from coordinator.tasks.ended_tasks import EndedTask, EndedTasks
from coordinator.tasks.placement import OpenGroup, foreign_to
from coordinator.tasks.shedding import Shedding
from coordinator.tasks.task import (
    ATTEMPTS_APART,
    FAILURES,
    HELD,
    LOSSES_MAX,
    LOST_TOO_OFTEN,
    State,
    Task,
    ask,
    dropped,
    is_newest,
    new_task,
    not_held,
    out_of_time,
    placed,
    too_long,
)
from coordinator.tasks.task_table import TaskTable


class TaskPool:
    """The task pool of a cell.

    While `recovering`, ranks have yet to report what they hold: nothing is placed, and a rank may
    hold a task that is submitted.
    """

    __slots__ = (
        "_arrivals",
        "_carried",
        "_deadlines",
        "_displace_due_ms",
        "_ended",
        "_held",
        "_limits",
        "_pause_limit_from_ms",
        "_pausing",
        "_shedding",
        "_tasks",
        "_unclaimed",
        "context_tokens_max",
        "recovering",
    )

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._tasks = TaskTable(limits.ageing_ms)
        self._ended = EndedTasks()
        self._unclaimed: dict[TaskId, int] = {}
        """Tasks not claimed since their gateway or this coordinator started -> time limit."""
        self._deadlines: list[tuple[int, TaskId]] = []
        self._arrivals = 0
        self._carried: Counter[Carry] = Counter()
        self._shedding = Shedding(limits.queue)
        self._held: frozenset[Tier] = frozenset()
        """Tiers whose tasks do not begin now."""
        self._displace_due_ms = 0
        self._pausing: frozenset[Tier] = frozenset()
        """Tiers whose tasks may be paused for longer than the limit."""
        self._pause_limit_from_ms = 0
        """When that ended: the limit counts from then at the earliest."""
        self.context_tokens_max = 0
        """The longest context of any group that the ranks could form; 0 is unknown."""
        self.recovering = True

    @property
    def tasks(self) -> TaskTable:
        """The unfinished tasks; callers must not change them."""
        return self._tasks

    def change_bounds(self, queue: QueueBounds, ageing_ms: int) -> None:
        """Bound the queue by other numbers from now on; queued tasks stay."""
        self._shedding.bounds = queue
        self._tasks.queue.ageing_ms = ageing_ms

    def alternate(self, now_ms: int, *, holds: bool, pauses: bool) -> None:
        """Begin no batch task while it `holds`; leave paused ones alone while it `pauses`."""
        self._held = frozenset({Tier.BATCH} if holds else ())
        if self._pausing and not pauses:
            self._pause_limit_from_ms = now_ms
        self._pausing = frozenset({Tier.BATCH} if pauses else ())

    def take_carried(self) -> Counter[Carry]:
        """Return how many tasks each carry plan affected since the last call."""
        carried, self._carried = self._carried, Counter()
        return carried

    def submit(self, message: Submit, now_ms: int) -> list[Effect]:
        """Take a task in, or record that its gateway still wants it."""
        task = self._tasks.get(message.header.task)
        if task is None:
            ended = self._ended.get(message.header.task)
            return self._admit(message, now_ms) if ended is None else self._again(message, ended)
        self._unclaimed.pop(task.id, None)
        if task.payload is None:
            task.payload, task.prefixes = message.payload, message.prefixes
        last_attempt = max(task.attempt, task.acked_attempt)
        was_elsewhere = cells_before(message.attempt) > cells_before(last_attempt)
        task.acked_attempt = max(task.acked_attempt, message.attempt)
        task.void_attempt = max(task.void_attempt, message.void_attempt)
        if was_elsewhere:
            return self._take_back(task, task.acked_attempt, now_ms)
        if task.state is State.ASKED and not self.recovering:
            if message.attempt < task.attempt:
                # Sent before the gateway read the request: tokens may still be in flight to it.
                return [ask(task)]
            return self._requeue(task, message, now_ms)
        is_void = task.attempt < task.acked_attempt or task.attempt <= task.void_attempt
        if task.state in HELD and is_void:
            # An earlier coordinator gave that attempt up. Tokens of a later one may be in flight.
            # It may have asked under the number of an attempt that it had not heard of.
            return self._take_back(task, task.acked_attempt, now_ms)
        return []

    def release(self, task_id: TaskId, *, is_done: bool = False) -> list[Effect]:
        """End a task that its gateway cancelled, or of which it has all tokens.

        The leader's report may not have arrived yet. If the task is done and only one leader ever
        had it, that leader has ended it by itself: a drop would only make it wait for its running
        step.
        """
        self._ended.settle(task_id)
        task = self._tasks.get(task_id)
        if task is None:
            return []
        is_known = is_done and task.state is State.PLACED and task.attempt == 1 and not task.former
        return self._end(task, reporter=task.leader if is_known else None)

    def withdraw(self, task_id: TaskId) -> list[Effect]:
        """Give a task up for another cell, if no rank has had it."""
        task = self._tasks.get(task_id)
        if task is None or task.state is not State.QUEUED or not task.is_fresh:
            return []
        return [*self._give_up(task), ToGateway(task.header.gateway, Withdrawn(task_id))]

    def gateway_opened(self, gateway: str, now_ms: int) -> None:
        """Expect the gateway to submit every task that it still wants."""
        for task in self._tasks.of_gateway(gateway):
            self._unclaimed[task] = now_ms + self._limits.claim_ms

    def gateway_gone(self, gateway: str) -> list[Effect]:
        """End all tasks of a gateway that does not come back."""
        tasks = self._tasks.of_gateway(gateway)
        return [effect for task in tasks for effect in self._give_up(self._tasks[task])]

    def ended(self, rank: Rank, message: TaskEnded) -> list[Effect]:
        """Handle a leader's report that a task ended."""
        task = self._tasks.current(rank, message.task, message.attempt)
        if task is None:
            return []
        if (failure := FAILURES.get(message.cause)) is not None:
            return self._fail(TaskFailed(task.id, *failure), reporter=rank)
        has_tokens = message.cause is EndCause.FINISHED
        return self._end(task, reporter=rank, pushed_by=rank if has_tokens else None)

    def returned(self, rank: Rank, message: TaskReturned, now_ms: int) -> list[Effect]:
        """Queue a task that its leader gave back; it continues after its tokens so far."""
        task = self._tasks.current(rank, message.task, message.attempt)
        if task is None:
            return []
        if message.cause is ReturnCause.RECOMPUTE and task.state is not State.RETURNING:
            self._carried[Carry.RECOMPUTE] += 1
        if len(message.generated_tokens) > len(task.tokens):
            task.former |= {rank}
        task.tokens = message.generated_tokens
        task.generated = len(task.tokens)
        if task.payload is None:
            # No gateway has submitted it yet, so it cannot be placed.
            return self._doubt(task, now_ms)
        self._tasks.enter(task, State.QUEUED, now_ms)
        return []

    def adopted(self, rank: Rank, message: Adopted, now_ms: int) -> list[Effect]:
        """Record that a committed migration made `rank` the leader of a task."""
        task = self._tasks.get(message.task)
        if task is not None and (task.leader, task.attempt) == (rank, message.attempt):
            return []
        if task is None or task.leader is None or task.attempt != message.attempt - 1:
            # It ended or was given up meanwhile, and may even run under the same number.
            effects: list[Effect] = [ToRank(rank, Drop(message.task, message.attempt))]
            is_new = task is not None and task.state is not State.ASKED
            if task is not None and is_new and task.attempt <= message.attempt:
                effects += self._take_back(task, message.attempt, now_ms)
            return effects
        task.former |= {task.leader}
        task.attempt, task.generated = message.attempt, max(task.generated, message.generated)
        self._tasks.enter(task, State.PLACED, now_ms, rank)
        self._tasks.loads.homes.cached(rank, task.prefixes)  # Its KV came along.
        self._carried[Carry.RESHARD] += 1
        return []

    def given_away(self, rank: Rank, task_id: TaskId, now_ms: int) -> list[Effect]:
        """Take back a task that its leader gives to a rank which is not there."""
        task = self._tasks.get(task_id)
        if task is None or task.leader != rank:
            return []
        return self._take_back(task, task.attempt, now_ms)

    def progress(self, rank: Rank, items: Iterable[TaskProgress], now_ms: int) -> None:
        """Record the progress of a leader's tasks; only from its newest report."""
        self._carried[Carry.PAUSE] += self._tasks.progress(rank, items, now_ms)

    def reconcile(self, hello: RankHello, now_ms: int, *, has_moved: bool = False) -> list[Effect]:
        """Compare the tasks that a rank holds in its new session with those it should hold."""
        effects: list[Effect] = []
        believed = self._tasks.held_by(hello.rank)
        for task in not_held(hello, believed, has_moved=has_moved):
            effects += self._doubt(task, now_ms)
        adopted = {each.task for each in hello.adopted}
        for each in hello.held:
            effects += self._hold(hello.rank, each, now_ms)
            if has_moved and each.moves and each.header.task not in adopted:
                effects += self.given_away(hello.rank, each.header.task, now_ms)
        return effects

    def lost(self, rank: Rank, now_ms: int, *, is_at_fault: bool = True) -> list[Effect]:
        """Take back the tasks that a lost rank led; they continue after their delivered tokens.

        A task that is lost with more than `LOSSES_MAX` ranks fails. Ranks that were not at fault,
        since they were ended, do not count.
        """
        effects: list[Effect] = []
        for task in self._tasks.held_by(rank) if is_at_fault else ():
            task.losses += 1
            if task.losses > LOSSES_MAX:
                effects += self._fail(TaskFailed(task.id, "worker_lost", LOST_TOO_OFTEN))
        return [*effects, *self.cut_off(rank, None, now_ms)]

    def cut_off(self, rank: Rank, reply_to: str | None, now_ms: int) -> list[Effect]:
        """Take back tasks of a rank that lost its link to this address; None means all links."""
        effects: list[Effect] = []
        for task in self._tasks:
            # Its last tokens may be lost; or the rank lives, and comes back with the task.
            was_led = task.leader == rank or (rank in task.former and task.state is not State.ASKED)
            if was_led and reply_to in (None, task.header.reply_to):
                effects += self._take_back(task, task.attempt, now_ms)
        effects += [ToGateway(*each) for each in self._ended.in_doubt(rank, reply_to)]
        return effects

    def on_broken_links(self, rank: Rank, addresses: Iterable[str], now_ms: int) -> list[Effect]:
        """Take back tasks of a rank whose last tokens may be lost on newly broken links.

        Placement puts no task on such a link until the rank reports that it works again.
        """
        effects: list[Effect] = []
        for reply_to in addresses:
            if asked := self.cut_off(rank, reply_to, now_ms):
                effects += [warning("link_cut", rank=rank, reply_to=reply_to), *asked]
        return effects

    def recovered(self, now_ms: int) -> list[Effect]:
        """End recovery: all living ranks have reported what they hold."""
        self.recovering = False
        effects: list[Effect] = []
        for task in self._tasks:
            if task.payload is None:
                self._unclaimed[task.id] = now_ms + self._limits.claim_ms
            if task.state is State.ASKED and task.payload is not None and not task.acked_attempt:
                # Its gateway had never submitted it before, so no rank has ever run it.
                self._tasks.enter(task, State.QUEUED, now_ms)
            elif task.state is State.ASKED:
                effects.append(ask(task))
        return effects

    def tick(self, now_ms: int) -> list[Effect]:
        """Advance time: deadlines, pauses, unclaimed tasks."""
        effects: list[Effect] = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            if task := self._tasks.get(heappop(self._deadlines)[1]):
                effects += self._fail(out_of_time(task))
        for shed in self._shedding.overdue(self._tasks, now_ms):
            if self._tasks[shed.task].header.tier not in self._held:
                effects += self._fail(shed)
        for task in [self._tasks[task_id] for task_id in sorted(self._tasks.paused)]:
            if task.header.tier in self._pausing or task.leader is None:
                continue
            since_ms = max(task.since_ms, self._pause_limit_from_ms)
            if now_ms - since_ms >= self._limits.pause_limit_ms:
                effects.append(ToRank(task.leader, GiveBack(task.id)))
                self._tasks.enter(task, State.RETURNING, now_ms, task.leader)
        for task_id in [task for task, until_ms in self._unclaimed.items() if now_ms >= until_ms]:
            effects += self._give_up(self._tasks[task_id])
        return effects

    def place(self, groups: Iterable[OpenGroup], now_ms: int) -> list[Effect]:
        """Give tasks to groups that have room, in order."""
        self._shedding.has_groups = bool(groups := tuple(groups))
        effects = self._choose(groups, now_ms)
        waits = self._tasks.queue or any(each.urgent_waiting for each in groups)
        if waits and now_ms >= self._displace_due_ms:
            self._displace_due_ms = now_ms + LOOK_EVERY_MS
            for _ in range(DISPLACED_FOR_MAX):
                if not (taken := self._displace(groups, now_ms)):
                    break
                effects += [*taken, *self._choose(groups, now_ms)]
        return effects

    def _choose(self, groups: Sequence[OpenGroup], now_ms: int) -> list[Effect]:
        tasks = self._tasks
        chosen = tasks.loads.choose(groups, tasks.queue, tasks.__getitem__, now_ms, self._held)
        return [self._place(task, group, now_ms) for task, group in chosen]

    def _displace(self, groups: Sequence[OpenGroup], now_ms: int) -> list[Effect]:
        """Take batch tasks back for an urgent one that waits for room."""
        effects: list[Effect] = []
        for task in displaced(self._tasks, groups, now_ms):
            assert task.leader is not None
            task.displacements += 1
            effects.append(ToRank(task.leader, GiveBack(task.id)))
            self._tasks.enter(task, State.RETURNING, now_ms, task.leader)
        return effects

    def vacate(self, groups: Sequence[OpenGroup], now_ms: int) -> list[Effect]:
        """Take back what waits in groups that have been reserved for more urgent tiers since."""
        effects: list[Effect] = []
        for group in groups if any(each.reserved_tiers for each in groups) else ():
            for task in [self._tasks[name] for name in self._tasks.loads.of(group.leader)]:
                waits = task.state is State.PLACED and not task.generated
                if waits and foreign_to(group, groups, task):
                    effects.append(ToRank(group.leader, GiveBack(task.id)))
                    self._tasks.enter(task, State.RETURNING, now_ms, group.leader)
        return effects

    def in_need_of(
        self, larger: Iterable[OpenGroup], groups: Iterable[OpenGroup]
    ) -> OpenGroup | None:
        """Return the largest of the `larger` groups if a queued task fits it, and none of `groups`.

        Such a task would wait for as long as the groups stay as they are.
        """
        largest = max(larger, key=lambda each: each.context_tokens_max, default=None)
        if largest is None:
            return None
        longest = max((each.context_tokens_max for each in groups), default=0)
        needs = (task.context_tokens_max for task in self._tasks if task.state is State.QUEUED)
        return largest if any(longest < n <= largest.context_tokens_max for n in needs) else None

    def recheck_context(self) -> list[Effect]:
        """Fail queued tasks that are now too long for every group that can still be formed."""
        queued = [task for task in self._tasks if task.state is State.QUEUED]
        failures = [each for task in queued if (each := too_long(task, self.context_tokens_max))]
        return [effect for failure in failures for effect in self._fail(failure)]

    def integrity(self) -> None:
        """Assert the invariant; costs O(tasks)."""
        self._tasks.integrity()
        for task in self._tasks:
            assert task.id not in self._ended, f"task {task.id} is both ended and unfinished."
        assert all(map(self._tasks.__contains__, self._unclaimed)), "an ended task is unclaimed."

    def _admit(self, message: Submit, now_ms: int) -> list[Effect]:
        """Take in an unknown task, or refuse it."""
        task = new_task(message, self._arrivals, now_ms)
        if failure := too_long(task, self.context_tokens_max):
            return [ToGateway(task.header.gateway, failure)]
        # A stream that has begun is never refused.
        shed = None if task.acked_attempt else self._shedding.make_room(self._tasks, task, now_ms)
        if shed is not None and shed.task == task.id:
            return [ToGateway(task.header.gateway, shed)]
        effects = [] if shed is None else self._fail(shed)
        self._arrivals += 1
        if self.recovering or task.acked_attempt:
            # A rank not heard yet may hold it, or may have run it before it was lost.
            task.state = State.ASKED
            task.attempt += ATTEMPTS_APART
        self._add(task)
        return [*effects, ask(task)] if task.acked_attempt and not self.recovering else effects

    def _again(self, message: Submit, ended: EndedTask) -> list[Effect]:
        """Handle the submission of a task that has ended."""
        task_id = message.header.task
        # If another cell has had the task since, it comes back: this cell withdrew it.
        if cells_before(message.attempt) == cells_before(ended.attempt):
            if ended.failure is not None:
                return [ToGateway(ended.header.gateway, ended.failure)]
            if not ended.may_return:
                # It was cancelled, or its last tokens are in flight.
                return []
            if message.attempt <= ended.attempt:
                return [ToGateway(ended.header.gateway, Resubmit(task_id, ended.attempt + 1))]
        self._ended.revive(task_id)
        self._add(new_task(message, ended.arrival, ended.arrived_ms))
        return []

    def _requeue(self, task: Task, message: Submit, now_ms: int) -> list[Effect]:
        """Queue a task again; it continues after the tokens that its gateway delivered."""
        effects = dropped(task)
        task.former = frozenset()
        task.tokens = message.delivered_tokens
        task.generated = len(task.tokens)
        self._tasks.enter(task, State.QUEUED, now_ms)
        return effects

    def _add(self, task: Task) -> None:
        self._tasks.add(task)
        if task.header.deadline_ms:
            heappush(self._deadlines, (task.arrived_ms + task.header.deadline_ms, task.id))

    def _place(self, task: Task, group: OpenGroup, now_ms: int) -> Effect:
        task.attempt = max(task.attempt, task.acked_attempt) + 1
        self._shedding.placed(now_ms)
        self._tasks.queue.placed(task, now_ms)
        self._tasks.enter(task, State.PLACED, now_ms, group.leader)
        return placed(task, group.binding, now_ms)

    def _hold(self, rank: Rank, held: HeldTask, now_ms: int) -> list[Effect]:
        """Accept that a rank holds a task, unless the pool knows better."""
        task_id = held.header.task
        task = self._tasks.get(task_id)
        if task_id in self._ended or (
            task and not is_newest(task, rank, held, recovering=self.recovering)
        ):
            return [ToRank(rank, Drop(task_id, held.attempt))]
        effects: list[Effect] = []
        if task is None:
            task = Task(held.header, self._arrivals, now_ms, State.ASKED, now_ms)
            self._arrivals += 1
            self._add(task)
            self._unclaimed[task_id] = now_ms + self._limits.claim_ms
        elif task.leader is not None and task.leader != rank:
            effects += dropped(task)
        task.attempt = held.attempt
        task.generated = max(task.generated, held.generated)
        self._tasks.enter(task, State.PAUSED if held.paused else State.PLACED, now_ms, rank)
        return effects

    def _take_back(self, task: Task, attempt: int, now_ms: int) -> list[Effect]:
        """Continue a task after what its gateway has; this attempt and lower ones are void."""
        effects = dropped(task)
        task.attempt = attempt
        return [*effects, *self._doubt(task, now_ms)]

    def _doubt(self, task: Task, now_ms: int) -> list[Effect]:
        """Ask the task's gateway: its progress is unknown here.

        The question uses an attempt of its own that is never placed, so the answer can be
        distinguished from what the gateway sent before it.
        """
        self._tasks.enter(task, State.ASKED, now_ms)
        task.attempt += 1
        return [] if self.recovering else [ask(task)]

    def _give_up(self, task: Task) -> list[Effect]:
        """End a task that seems unwanted; its gateway may still submit it again."""
        effects = self._end(task)
        self._ended[task.id].may_return = True
        return effects

    def _end(
        self, task: Task, *, reporter: Rank | None = None, pushed_by: Rank | None = None
    ) -> list[Effect]:
        """Forget a task; its leader drops it, unless that leader reported the end."""
        effects = dropped(task) if task.leader != reporter else []
        self._tasks.remove(task)
        self._unclaimed.pop(task.id, None)
        pushers = task.former | {pushed_by} if pushed_by is not None else frozenset()
        ended = EndedTask(task.header, task.attempt, task.arrival, task.arrived_ms, pushers)
        self._ended.add(task.id, ended)
        return effects

    def _fail(self, failure: TaskFailed, *, reporter: Rank | None = None) -> list[Effect]:
        """End a task and send its gateway the reason."""
        task = self._tasks[failure.task]
        effects = self._end(task, reporter=reporter)
        self._ended[task.id].failure = failure
        return [*effects, ToGateway(task.header.gateway, failure)]
