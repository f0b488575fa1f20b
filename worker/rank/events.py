"""What happens to a rank, and what its core asks the shell to do about it: frozen values.

Messages of the coordinator are events as they are. `core.RankCore.handle` takes one event and
returns one effect; the shell does it and hands its result back as the next event.
"""

from dataclasses import dataclass, field

from comm_pool.formations import PeerLostError
from coordinator.protocol.messages.rank import (
    Directive,
    Drop,
    GiveBack,
    RankDown,
    RankHello,
    Report,
)
from coordinator.protocol.switch_actions import Join, Leave, Reshard, Resolve, Serve
from coordinator.protocol.terms import Binding
from worker.io.session import HelloWanted
from worker.io.step_queue import QueueMessage
from worker.rank.engine import NoRoomError

# ------------------------------------------------------------------ events by themselves


@dataclass(frozen=True, slots=True)
class Tick:
    """The rank is at a safe point, and its inbox is empty: another pass begins."""


@dataclass(frozen=True, slots=True)
class CopiesDone:
    """All copies of a migration on this rank are done, perhaps after its commit."""

    epoch: int
    seconds: float
    link_bytes: int


@dataclass(frozen=True, slots=True)
class DetachedStepEnded:
    """The last step of a group that the rank has left is over."""

    ended_ns: int


# ------------------------------------------------------------------ results of effects


class Result:
    """What an effect led to."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Done(Result):
    """The effect is done, and there is nothing to tell of it."""


@dataclass(frozen=True, slots=True)
class StepFinished(Result):
    """A led step was launched, and the one before it is finished; that took `took_us`."""

    took_us: int


@dataclass(frozen=True, slots=True)
class StepFailed(Result):
    """A peer was lost, or memory ran out, in a part of a step."""

    error: PeerLostError | NoRoomError


@dataclass(frozen=True, slots=True)
class QueueRead(Result):
    """The runtime has obeyed this message of the step queue; None: there was none."""

    message: QueueMessage | None


@dataclass(frozen=True, slots=True)
class QueuesDrained(Result):
    """All step queues are empty; leave messages of these formations were there."""

    formations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepared(Result):
    """The next migration is planned as far as possible, and any late deferred step has run."""

    awaits_peers: bool


@dataclass(frozen=True, slots=True)
class CopiedEarly(Result):
    """Some KV was copied while the group serves; `ends_round`: that was the last of a round."""

    ends_round: bool


@dataclass(frozen=True, slots=True)
class Overtaken(Result):
    """A migration was given up, because another layout is wanted by now."""


Event = RankDown | HelloWanted | Tick | CopiesDone | DetachedStepEnded | Result

# ------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class LeadStep:
    """Launch a step of the led group."""

    epoch: int


@dataclass(frozen=True, slots=True)
class DeferStep:
    """Plan the last step of the led group, and let all members defer it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class FinishStep:
    """Finish the in-flight step."""


@dataclass(frozen=True, slots=True)
class ForgetSteps:
    """Drop all state of the formation's last step: it never ends."""

    binding: Binding


@dataclass(frozen=True, slots=True)
class Follow:
    """Read a message of the joined group's step queue, and obey it."""

    binding: Binding
    wait_s: float


@dataclass(frozen=True, slots=True)
class DrainQueues:
    """Empty the step queues of all groups that other ranks lead."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Let a group that begins compute the probe."""

    binding: Binding
    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Obey:
    """Remove a task."""

    command: Drop | GiveBack


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish this rank's manifest for the migration of this epoch.

    All ranks have read all manifests of the round `drafted`; 0: there is none.
    """

    epoch: int
    drafted: int = 0


@dataclass(frozen=True, slots=True)
class Prepare:
    """Plan the migration of this directive, if any, and run a deferred step that is due."""

    wanted: Directive | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class CopyEarly:
    """Copy some KV for the switch of this directive, while the group serves."""

    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class EndPreCopy:
    """Forget the early copies, and give their pages back."""


@dataclass(frozen=True, slots=True)
class SendHello:
    """Begin a session."""

    hello: RankHello = field(repr=False)


@dataclass(frozen=True, slots=True)
class SendReport:
    """Send a report."""

    report: Report = field(repr=False)


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the inbox, at most this long."""

    seconds: float


Effect = (
    Leave
    | Join
    | Serve
    | Reshard
    | Resolve
    | LeadStep
    | DeferStep
    | FinishStep
    | ForgetSteps
    | Follow
    | DrainQueues
    | Probe
    | Obey
    | Publish
    | Prepare
    | CopyEarly
    | EndPreCopy
    | SendHello
    | SendReport
    | Wait
)
"""What the shell does for the core; the first five are the participant's actions."""
