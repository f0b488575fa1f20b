"""What a rank's seat tells its shell to do next; `directive` is the one that the move obeys."""

from dataclasses import dataclass, field

from coordinator.protocol.messages.rank import Directive, LeaseRetention
from coordinator.protocol.terms import Binding, Carry, Stage


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the joined group; afterwards PARK is acknowledged.

    A leader sends the leave message (`binding.formation`) and applies the carry plan to its tasks;
    a follower only unbinds. With `group_lost` a member's share of the KV is gone, or the followers
    may be, so the tasks are returned for recompute whatever the plan.
    """

    binding: Binding
    carry: Carry
    is_leader: bool
    group_lost: bool
    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Park:
    """Nothing is joined; acknowledge PARK."""

    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reshard:
    """Copy this rank's share of the parked tasks' KV; nothing is given up before `Resolve`."""

    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Resolve:
    """The move of `epoch` is decided: go on with what was taken over, or with what was left.

    With `is_joined` the prepared group is joined next. If not, as another layout is wanted by now,
    the tasks stay where they are as long as the next move may take them (`is_kept`); otherwise the
    plan of `directive` is applied to them now.
    """

    epoch: int
    is_committed: bool
    is_kept: bool
    is_joined: bool
    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Join:
    """Select the prepared objects of the group's mode and, as a follower, read its step queue."""

    binding: Binding
    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Serve:
    """Reduce the group's lease to `kept`, add `grant_pages` pages to it (dp: own them), serve."""

    binding: Binding
    grant_pages: int
    kept: LeaseRetention | None
    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ack:
    """The group does not change: adopt the stage without stopping."""

    stage: Stage
    directive: Directive = field(repr=False)


Move = Leave | Park | Reshard | Resolve | Join | Serve | Ack
