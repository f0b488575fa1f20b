"""A modelled group: continuous batching, step by step, like vLLM's scheduler.

A step decodes one token of every running task and fills the rest of its token budget with prompts,
the most urgent first. Consecutive decodes that nothing can disturb are simulated at once. The
simulated cell calls this module.
"""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from comm_pool.layout import Group
from coordinator.model.cost_model import GroupCost
from coordinator.tasks.task import Task

STRIDE_MAX = 64
"""Decodes simulated at once, at most; the progress of tasks is exact regardless."""


@dataclass(slots=True)
class SimTask:
    """A task and the simulator's own state of it; times in seconds."""

    task: Task
    output: int
    arrive_s: float
    has_kv: bool = False
    """A group has started it and holds its KV, which a switch may migrate."""
    remaining_prefill_tokens: int = 0
    first_s: float | None = None
    done_at: int = 0
    """The group's step count at which its last token comes."""

    @property
    def order(self) -> tuple[int, int]:
        """The more urgent tier first, then the earlier arrival."""
        return int(self.task.header.tier), self.task.arrival

    @property
    def tokens(self) -> int:
        """Tokens to compute before decoding continues, if none are computed."""
        return self.task.header.prompt_tokens + self.task.generated


@dataclass(slots=True)
class SimGroup:
    """One serving group; `ends_s` is when the running step ends, or None."""

    group: Group
    cost: GroupCost
    waiting: list[tuple[tuple[int, int], str, SimTask]] = field(default_factory=list)
    filling: list[tuple[tuple[int, int], str, SimTask]] = field(default_factory=list)
    decoding: list[tuple[int, str, SimTask]] = field(default_factory=list)
    context: int = 0
    steps: int = 0
    ends_s: float | None = None
    version: int = 0
    stopping: bool = False
    _stride: int = 0
    _step_s: float = 0.0
    _started_s: float = 0.0
    _chunks: list[tuple[SimTask, int]] = field(default_factory=list)

    def add(self, task: SimTask, now_s: float) -> None:
        """Add a task; running decodes end at their next step."""
        if task.has_kv and task.remaining_prefill_tokens:
            self.filling.append((task.order, task.task.id, task))
        elif task.has_kv:
            task.done_at = self.steps + task.output - task.task.generated
            heappush(self.decoding, (task.done_at, task.task.id, task))
            self.context += task.task.header.prompt_tokens + task.task.generated
        else:
            heappush(self.waiting, (task.order, task.task.id, task))
        self.cut(now_s)

    def drop(self, task: SimTask, now_s: float) -> None:
        """Remove a task, which is computed again; running decodes end at their next step."""
        self.waiting = [each for each in self.waiting if each[2] is not task]
        heapify(self.waiting)
        self.filling = [each for each in self.filling if each[2] is not task]
        self._chunks = [each for each in self._chunks if each[0] is not task]
        if any(each[2] is task for each in self.decoding):
            task.task.generated = self.generated(task)
            self.decoding = [each for each in self.decoding if each[2] is not task]
            heapify(self.decoding)
            self.context -= task.task.header.prompt_tokens + task.task.generated
        task.has_kv = False
        self.cut(now_s)

    def take_waiting(self, tiers: int) -> list[SimTask]:
        """Remove and return the tasks that wait here and are of none of the first `tiers` tiers."""
        foreign = [each for each in self.waiting if each[0][0] >= tiers]
        self.waiting = [each for each in self.waiting if each[0][0] < tiers]
        heapify(self.waiting)
        return [task for _, _, task in foreign]

    def cut(self, now_s: float) -> None:
        """End the running decodes at their next step."""
        if self.ends_s is None or self._stride < 2:
            return
        done = int((now_s - self._started_s) / self._step_s) + 1
        if done < self._stride:
            self._stride = done
            self.ends_s = self._started_s + done * self._step_s
            self.version += 1

    def start(self, now_s: float) -> bool:
        """Start the next step if there is work; return whether one started."""
        if self.stopping:
            return False
        self._admit()
        running = len(self.decoding)
        budget = max(0, self.cost.chunk_tokens - running)
        self._chunks = []
        for _, _, task in sorted(self.filling):
            if budget <= 0:
                break
            part = min(task.remaining_prefill_tokens, budget)
            self._chunks.append((task, part))
            budget -= part
        if not running and not self._chunks:
            return False
        prefill = sum(part for _, part in self._chunks)
        self._stride = 1
        if not prefill:
            self._stride = max(1, min(STRIDE_MAX, self.decoding[0][0] - self.steps))
        context = self.context + running * self._stride / 2
        self._step_s = self.cost.step_s(running + prefill, context)
        self._started_s = now_s
        self.ends_s = now_s + self._stride * self._step_s
        self.version += 1
        return True

    def finish(self, now_s: float) -> list[SimTask]:
        """End the running step; return the completed tasks."""
        self.steps += self._stride
        self.context += len(self.decoding) * self._stride
        self.ends_s = None
        for task, part in self._chunks:
            task.remaining_prefill_tokens -= part
            if not task.remaining_prefill_tokens:
                self._begin_decoding(task, now_s)
        self._chunks = []
        done = []
        while self.decoding and self.decoding[0][0] <= self.steps:
            task = heappop(self.decoding)[2]
            self.context -= task.task.header.prompt_tokens + task.output
            done.append(task)
        return done

    def generated(self, task: SimTask) -> int:
        """Return how many tokens a decoding task of this group has."""
        return task.output - max(0, task.done_at - self.steps)

    def give_up(self) -> tuple[list[SimTask], list[SimTask]]:
        """Return the tasks that hold KV of at least a part of their prompt, and the others.

        The group is gone.
        """
        for _, _, task in self.decoding:
            task.task.generated = self.generated(task)
        for _, _, task in self.filling:
            task.has_kv = task.remaining_prefill_tokens < task.tokens
        begun = [task for _, _, task in [*self.decoding, *self.filling]]
        held = [task for task in begun if task.has_kv]
        fresh = [task for task in begun if not task.has_kv]
        return held, fresh + [task for _, _, task in self.waiting]

    def _begin_decoding(self, task: SimTask, now_s: float) -> None:
        self.filling = [each for each in self.filling if each[2] is not task]
        generated = max(1, task.task.generated)
        if task.first_s is None:
            task.first_s = now_s
        task.task.generated = generated
        task.done_at = self.steps + task.output - generated
        self.context += task.task.header.prompt_tokens + generated
        heappush(self.decoding, (task.done_at, task.task.id, task))

    def _admit(self) -> None:
        """Start waiting prompts while there is KV for them."""
        held = self.context + sum(each.task.header.prompt_tokens for _, _, each in self.filling)
        while self.waiting:
            task = self.waiting[0][2]
            length = task.tokens
            alone = not self.decoding and not self.filling
            if not alone and held + length > self.cost.capacity_tokens:
                return
            heappop(self.waiting)
            task.has_kv = True
            task.remaining_prefill_tokens = length
            held += length
            self.filling.append((task.order, task.task.id, task))
