"""The unfinished tasks and all indices over their states.

Invariant: each task is in exactly one state, and the queue, the leaders' loads, the paused tasks
and each gateway's tasks agree with it. Only `enter` changes a state. The task pool calls this
module.
"""

from collections.abc import Iterable, Iterator

from comm_pool.layout import Rank
from coordinator.protocol.messages.tasks import TaskProgress
from coordinator.protocol.terms import TaskId
from coordinator.tasks.placement import Loads
from coordinator.tasks.task import HELD, State, Task
from coordinator.tasks.task_queue import TaskQueue


class TaskTable:
    """Tasks by id, and indices over their states."""

    __slots__ = ("_by_gateway", "_tasks", "loads", "paused", "queue")

    def __init__(self, ageing_ms: int) -> None:
        self._tasks: dict[TaskId, Task] = {}
        self._by_gateway: dict[str, set[TaskId]] = {}
        self.queue = TaskQueue(ageing_ms)
        self.loads = Loads()
        self.paused: set[TaskId] = set()

    def __len__(self) -> int:
        """Return the number of unfinished tasks."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        """All unfinished tasks, as of now, in order of arrival."""
        return iter(tuple(self._tasks.values()))

    def __contains__(self, task: object) -> bool:
        """Return whether the task is unfinished."""
        return task in self._tasks

    def __getitem__(self, task: TaskId) -> Task:
        """Return an unfinished task."""
        return self._tasks[task]

    def get(self, task: TaskId) -> Task | None:
        """Return the task if it is unfinished."""
        return self._tasks.get(task)

    def current(self, rank: Rank, task_id: TaskId, attempt: int) -> Task | None:
        """Return the task if `rank` holds it and `attempt` is its current placement."""
        task = self._tasks.get(task_id)
        if task is None or task.leader != rank or task.attempt != attempt:
            return None
        return task

    def of_gateway(self, gateway: str) -> list[TaskId]:
        """Return the gateway's tasks, in order of their ids."""
        return sorted(self._by_gateway.get(gateway, ()))

    def held_by(self, rank: Rank) -> list[Task]:
        """Return the tasks that the rank holds as a leader."""
        return [task for task in self._tasks.values() if task.leader == rank]

    def add(self, task: Task) -> None:
        """Add a new task that no leader holds."""
        assert task.id not in self._tasks, f"task {task.id} exists already."
        assert task.state not in HELD, f"new task {task.id} has a leader's state."
        self._tasks[task.id] = task
        self._by_gateway.setdefault(task.header.gateway, set()).add(task.id)
        if task.state is State.QUEUED:
            self.queue.put(task)

    def remove(self, task: Task) -> None:
        """Remove a task from all indices."""
        self._leave(task)
        del self._tasks[task.id]
        siblings = self._by_gateway[task.header.gateway]
        siblings.remove(task.id)
        if not siblings:
            del self._by_gateway[task.header.gateway]

    def enter(self, task: Task, state: State, now_ms: int, leader: Rank | None = None) -> None:
        """Change a task's state; `leader` is set in the states in which a leader holds it."""
        assert (leader is not None) == (state in HELD), f"task {task.id}: {leader} in {state}."
        self._leave(task)
        task.state = state
        task.since_ms = now_ms
        task.leader = leader
        if state is State.QUEUED:
            self.queue.put(task)
        elif state is State.PAUSED:
            self.paused.add(task.id)
        elif state is State.PLACED and leader is not None:
            self.loads.count(leader, task.id, task.context_tokens)

    def grow(self, task: Task, generated: int, now_ms: int) -> None:
        """Record the progress of a held task."""
        task.generated = max(task.generated, generated)
        if task.generated and task.first_ms is None:
            task.first_ms = now_ms
        if task.state is State.PLACED and task.leader is not None:
            self.loads.count(task.leader, task.id, task.context_tokens)

    def progress(self, rank: Rank, items: Iterable[TaskProgress], now_ms: int) -> int:
        """Record the progress of a leader's tasks; return how many it has newly paused."""
        paused = 0
        for item in items:
            task = self._tasks.get(item.task)
            if task is None or task.leader != rank:
                continue
            self.grow(task, item.generated, now_ms)
            state = State.PAUSED if item.paused else State.PLACED
            if task.state is not State.RETURNING and task.state is not state:
                paused += item.paused
                self.enter(task, state, now_ms, rank)
        return paused

    def integrity(self) -> None:
        """Assert the invariant; costs O(tasks)."""
        tasks = self._tasks.values()
        queued = sorted(task.id for task in tasks if task.state is State.QUEUED)
        assert sorted(self.queue.in_order(0, ())) == queued, "queue and states differ."
        placed = {(task.leader, task.id) for task in tasks if task.state is State.PLACED}
        assert self.loads.counted() == placed, "loads and states differ."
        paused = {task.id for task in tasks if task.state is State.PAUSED}
        assert self.paused == paused, "paused tasks and states differ."
        for task in tasks:
            assert (task.leader is not None) == (task.state in HELD), f"task {task.id}: leader."
            assert task.id in self._by_gateway[task.header.gateway], f"task {task.id}: gateway."
            assert task.payload is not None or task.state is not State.QUEUED, "no payload."
        count = sum(len(siblings) for siblings in self._by_gateway.values())
        assert count == len(self._tasks), "gateways have tasks that do not exist."

    def _leave(self, task: Task) -> None:
        if task.state is State.QUEUED:
            self.queue.remove(task)
        elif task.state is State.PAUSED:
            self.paused.remove(task.id)
        elif task.state is State.PLACED and task.leader is not None:
            self.loads.remove(task.leader, task.id)
