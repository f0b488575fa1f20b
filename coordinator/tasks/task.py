"""One task as the pool knows it; the task pool calls this module and owns the state. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from comm_pool.layout import Rank
from coordinator.model.events import Effect, ToGateway, ToRank
from coordinator.protocol.messages.gateway import Resubmit, Submit, TaskFailed
from coordinator.protocol.messages.rank import Drop, Place, RankHello
from coordinator.protocol.messages.tasks import HeldTask, TaskHeader
from coordinator.protocol.terms import Binding, EndCause, TaskId

ATTEMPTS_APART = 1_000
"""More attempts of one task than one coordinator makes; a new coordinator starts above them."""

LOSSES_MAX = 3
LOST_TOO_OFTEN = (
    f"more than {LOSSES_MAX} ranks were lost while they ran this request, which may be the cause: "
    f"change it before you send it again."
)
NOT_RUN = "The engine could not run this request: check its parameters, "
FAILURES = {
    EndCause.REFUSED: ("invalid_value", NOT_RUN + "and send it again."),
    EndCause.FAILED: ("internal_error", NOT_RUN + "or ask the operator what the log says of it."),
}
"""Error code and fixed text for the client of a task that its leader could not run.

The engine's own message may quote the request, or reveal the server's internals."""


class State(Enum):
    """Where an unfinished task is; exactly one at a time."""

    QUEUED = "queued"
    """It waits in the pool for a group."""
    PLACED = "placed"
    """A leader runs it or has it waiting."""
    PAUSED = "paused"
    """Its leader holds its KV, but its group is not bound."""
    RETURNING = "returning"
    """Its leader has been asked to give it back."""
    ASKED = "asked"
    """Its progress is unknown: its gateway has to submit it again."""


HELD = frozenset({State.PLACED, State.PAUSED, State.RETURNING})
"""The states in which a leader holds the task."""


@dataclass(slots=True)
class Task:
    """An unfinished task.

    The next attempt continues after `tokens`; `generated` counts all known ones. `attempt` is the
    number of the last placement. In ASKED it is a number that this coordinator never places, so the
    gateway can separate tokens from before and after it.
    """

    header: TaskHeader
    arrival: int
    arrived_ms: int
    state: State
    since_ms: int
    """When it entered its state."""
    payload: bytes | None = None
    """None until its gateway submits it again, if a rank held it before this coordinator knew
    it."""
    prefixes: tuple[int, ...] = ()
    """Hashes of the prompt's first blocks."""
    tokens: tuple[int, ...] = ()
    generated: int = 0
    first_ms: int | None = None
    """When it was known to have a token; None as long as it is not."""
    attempt: int = 0
    leader: Rank | None = None
    former: frozenset[Rank] = frozenset()
    """Leaders that gave it away and whose last tokens may still be in flight."""
    acked_attempt: int = 0
    """The highest attempt that the gateway knows: it took tokens of it, or refuses them now."""
    void_attempt: int = 0
    """The highest attempt that the gateway takes no tokens of, by its last submission."""
    losses: int = 0
    """How many ranks were lost while they led it."""
    displacements: int = 0
    """How often it has made room for urgent tasks."""
    is_promoted: bool = False
    """It was placed for its age, so it makes room for no task."""
    is_charged: bool = False
    """Its tenant's share of the tier has been charged for it."""

    @property
    def id(self) -> TaskId:
        """The task's id."""
        return self.header.task

    @property
    def is_fresh(self) -> bool:
        """Whether no rank has had it yet, so its client has got no token."""
        return not (self.attempt or self.acked_attempt or self.tokens)

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV its next token needs."""
        return self.header.prompt_tokens + self.generated + 1

    @property
    def context_tokens_max(self) -> int:
        """Tokens whose KV it may need before it ends."""
        return self.header.prompt_tokens + self.header.max_tokens


def new_task(message: Submit, arrival: int, arrived_ms: int) -> Task:
    """Return the queued task of a gateway's submission."""
    return Task(
        header=message.header,
        arrival=arrival,
        arrived_ms=arrived_ms,
        state=State.QUEUED,
        since_ms=arrived_ms,
        payload=message.payload,
        prefixes=message.prefixes,
        tokens=message.delivered_tokens,
        generated=len(message.delivered_tokens),
        first_ms=arrived_ms if message.delivered_tokens else None,
        attempt=message.attempt,
        acked_attempt=message.attempt,
        void_attempt=message.void_attempt,
    )


def too_long(task: Task, limit: int) -> TaskFailed | None:
    """Return the failure of a task too long for contexts of `limit` tokens; 0 is unknown."""
    if not limit or task.context_tokens_max <= limit:
        return None
    reason = (
        f"the largest context here is {limit} tokens, but the request asks for "
        f"{task.context_tokens_max}, {task.header.prompt_tokens} in the prompt and up to "
        f"{task.header.max_tokens} to generate: shorten one of them."
    )
    return TaskFailed(task.id, "context_length_exceeded", reason)


def out_of_time(task: Task) -> TaskFailed:
    """Return the failure of a task at its deadline."""
    reason = (
        f"the request did not finish within {task.header.deadline_ms} ms: allow more time, or ask "
        f"for fewer tokens."
    )
    return TaskFailed(task.id, "deadline_exceeded", reason)


def placed(task: Task, binding: Binding, now_ms: int) -> Effect:
    """Send the task to the leader of its group."""
    assert task.payload is not None, f"task {task.id} is placed without its payload."
    place = Place(
        header=task.header,
        attempt=task.attempt,
        binding=binding,
        payload=task.payload,
        generated_tokens=task.tokens,
        waited_ms=now_ms - task.arrived_ms,
        is_promoted=task.is_promoted,
    )
    return ToRank(binding.group.leader, place)


def dropped(task: Task) -> list[Effect]:
    """Ask the task's leader, if it has one, to drop it."""
    return [] if task.leader is None else [ToRank(task.leader, Drop(task.id, task.attempt))]


def ask(task: Task) -> Effect:
    """Ask the task's gateway to submit it again, and to take no token of this attempt."""
    return ToGateway(task.header.gateway, Resubmit(task.id, task.attempt))


def not_held(hello: RankHello, believed: Iterable[Task], *, has_moved: bool) -> list[Task]:
    """Return the tasks that were placed on a rank and did not arrive.

    The rank may hold an earlier attempt of one: the last placement was lost with its session.
    Adopted tasks count only if their migration is committed (`has_moved`). Until then, a task that
    the rank does not hold has been given back, and that report may be lost with the old session.
    """
    held = {(each.header.task, each.attempt) for each in hello.held}
    moved = {each.task for each in hello.adopted} if has_moved else frozenset()
    return [
        task for task in believed if task.id not in moved and (task.id, task.attempt) not in held
    ]


def is_newest(task: Task, rank: Rank, held: HeldTask, *, recovering: bool) -> bool:
    """Return whether the attempt that a rank holds is the task's newest, and not void."""
    if recovering and held.attempt <= task.void_attempt:
        return False
    if task.state in HELD:
        is_known = task.leader == rank and task.attempt == held.attempt
        return is_known or (recovering and held.attempt > task.attempt)
    return task.state is State.ASKED and recovering and held.attempt >= task.acked_attempt
