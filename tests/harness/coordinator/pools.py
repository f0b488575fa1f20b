"""A task pool in the states that its tests start from."""

from collections.abc import Sequence

from comm_pool.layout import Group, Mode, Rank
from coordinator.model.events import Effect, ToGateway, ToRank
from coordinator.model.settings import PoolLimits, QueueBounds
from coordinator.protocol.messages.message import Message
from coordinator.protocol.messages.tasks import TaskEnded, TaskReturned
from coordinator.protocol.terms import Binding, EndCause, ReturnCause, TaskId
from coordinator.tasks.placement import OpenGroup
from coordinator.tasks.task import State
from coordinator.tasks.task_pool import TaskPool
from tests.harness.coordinator.builders import submit

ZERO, TWO = Rank(0), Rank(2)
A, B = TaskId("a"), TaskId("b")
LIMITS = PoolLimits(queue=QueueBounds(3), ageing_ms=1_000, pause_limit_ms=100, claim_ms=50)


def group(
    leader: Rank = ZERO,
    *,
    blocks: int = 10,
    max_tasks: int = 4,
    cut_off: str = "",
    urgent_waiting: int = 0,
) -> OpenGroup:
    binding = Binding(Group((leader,), Mode.DP), 1)
    unreachable = frozenset({cut_off})
    return OpenGroup(binding, max_tasks, blocks, 16, 0, unreachable, urgent_waiting)


def pool(*, recovering: bool = False) -> TaskPool:
    made = TaskPool(LIMITS)
    made.context_tokens_max = 160
    if not recovering:
        made.recovered(0)
    return made


def placed(*tasks: str, leader: Rank = ZERO) -> TaskPool:
    """A pool with these tasks placed at one leader, as their first attempts."""
    made = pool()
    for task in tasks:
        made.submit(submit(task), 0)
    assert len(made.place([group(leader)], 0)) == len(tasks)
    return made


def state(of: TaskPool, task: TaskId) -> State | None:
    of.integrity()
    found = of.tasks.get(task)
    return found.state if found else None


def messages(effects: Sequence[Effect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, ToRank | ToGateway)]


def ended(task: TaskId, attempt: int, cause: EndCause = EndCause.FINISHED) -> TaskEnded:
    return TaskEnded(task, attempt, cause, 3)


def returned(
    task: TaskId, attempt: int, *tokens: int, cause: ReturnCause = ReturnCause.RECOMPUTE
) -> TaskReturned:
    return TaskReturned(task, attempt, cause, tokens)
