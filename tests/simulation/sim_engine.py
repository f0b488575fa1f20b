"""A leader's scheduler in small: tasks, blocks of the group's pages, steps sent ahead."""

from collections import deque
from dataclasses import dataclass, field

from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import Binding, TaskId
from tests.simulation.checkers import check, digest
from tests.simulation.sim_gateway import Token
from tests.simulation.sim_memory import BLOCK_TOKENS, Places, marks
from tests.simulation.stepping import Step

KV_HEADS = 4


def slots_of(binding_width: int) -> int:
    return min(binding_width, KV_HEADS)


@dataclass
class SimTask:
    """A task that a leader holds."""

    header: TaskHeader
    attempt: int
    length: int
    tokens: list[int]
    digest: int = 0
    blocks: list[int] = field(default_factory=list)
    ahead: int = 0
    """Steps that were sent for it and are not complete."""
    computed: int = 0
    """Tokens that have KV, once all steps ahead are complete."""
    is_checked: bool = True
    """Its KV was made, or found to be there, since its group was formed."""

    def __post_init__(self) -> None:
        for token in self.tokens:
            self.digest = digest(self.digest, token)

    @property
    def wants_step(self) -> bool:
        return len(self.tokens) + self.ahead < self.length

    @property
    def blocks_wanted(self) -> int:
        tokens = self.header.prompt_tokens + len(self.tokens) + self.ahead + 1
        return -(-tokens // BLOCK_TOKENS)


class SimEngine:
    """The tasks of a bound group; the pages behind `blocks` are the rank's business."""

    def __init__(self, binding: Binding, indices: frozenset[int]) -> None:
        self.binding = binding
        self.slots = slots_of(binding.group.width)
        self.table = indices
        self.blocks_total = len(indices) * self.slots
        self.free = {index * self.slots + slot for index in indices for slot in range(self.slots)}
        self.tasks: dict[TaskId, SimTask] = {}
        self.in_flight: deque[Step] = deque()

    @property
    def running(self) -> int:
        """How many tasks have blocks; the others wait for theirs."""
        return sum(bool(task.blocks) for task in self.tasks.values())

    def resume(self, task: SimTask) -> bool:
        """Go on with a paused task, if all its blocks are still leased."""
        if not self.free.issuperset(task.blocks):
            return False
        self.free.difference_update(task.blocks)
        task.is_checked = False
        self.tasks[task.header.task] = task
        return True

    def remove(self, task_id: TaskId) -> SimTask | None:
        """Forget a task and free its blocks."""
        task = self.tasks.pop(task_id, None)
        if task is not None:
            self._release(task)
        return task

    def plan(self) -> Step | None:
        """Schedule a step; a task without a block takes them from the youngest, or waits."""
        batch: list[tuple[TaskId, int, int]] = []
        found: Places = ()
        made: Places = ()
        for task in list(self.tasks.values()):
            if task.wants_step and self._grow(task):
                name, before = task.header.task, task.computed
                task.computed = task.header.prompt_tokens + len(task.tokens) + task.ahead
                task.ahead += 1
                batch.append((name, task.attempt, before))
                if not task.is_checked:
                    found += marks(name, task.blocks, before)
                made += marks(name, task.blocks, task.computed, before)
                task.is_checked = True
        return Step(self.binding, self.table, tuple(batch), found, made) if batch else None

    def give_up(self, step: Step) -> None:
        """A planned step will not be executed."""
        computed = {task: before for task, _, before in step.batch}
        for task in self._of(step):
            task.ahead -= 1
            task.computed = min(task.computed, computed[task.header.task])

    def drop_steps(self) -> None:
        """None of those that are under way will be completed."""
        while self.in_flight:
            self.give_up(self.in_flight.popleft())

    def complete(self, step: Step, draw: int) -> list[Token]:
        """Draw a token for every task of a completed step; finished tasks are removed."""
        tokens: list[Token] = []
        for task in self._of(step):
            task.ahead -= 1
            check(task.ahead >= 0, f"{task.header.task} is further than it was scheduled")
            token = draw + len(tokens)
            is_last = len(task.tokens) + 1 == task.length
            task_id, index = task.header.task, len(task.tokens)
            tokens.append(Token(task_id, task.attempt, index, task.digest, token, is_last))
            task.tokens.append(token)
            task.digest = digest(task.digest, token)
        return tokens

    def _of(self, step: Step) -> list[SimTask]:
        found = [(self.tasks.get(TaskId(name)), attempt) for name, attempt, _ in step.batch]
        return [task for task, attempt in found if task is not None and task.attempt == attempt]

    def _grow(self, task: SimTask) -> bool:
        missing = task.blocks_wanted - len(task.blocks)
        while len(self.free) < missing:
            victims = [
                each
                for each in self.tasks.values()
                if each is not task and each.blocks and not each.ahead
            ]
            if not victims or (task.blocks == [] and len(self.tasks) > 1):
                return False
            self._release(victims[-1])
        task.blocks += [self.free.pop() for _ in range(missing)]
        return True

    def _release(self, task: SimTask) -> None:
        self.free.update(task.blocks)
        task.blocks = []
        task.computed = 0
