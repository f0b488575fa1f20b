"""Actions that a rank's switch participant asks its shell for; each obeys its `directive`."""

from dataclasses import dataclass, field

from coordinator.protocol.messages.rank import Directive, LeaseRetention
from coordinator.protocol.terms import Binding, Carry, Stage


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the joined group, then acknowledge PARK.

    A leader sends the leave message (`binding.formation`) and applies the carry plan to its tasks;
    a follower only unbinds. With `group_lost` a member's share of the KV is gone, or the followers
    may be, so the leader returns the tasks for recompute under every plan.
    """

    binding: Binding
    carry: Carry
    is_leader: bool
    group_lost: bool
    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Park:
    """Acknowledge PARK; the rank is joined to nothing."""

    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reshard:
    """Copy this rank's share of the parked tasks' KV; give nothing up before `Resolve`."""

    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Resolve:
    """The migration of `epoch` is decided: continue the adopted tasks on commit, else the old ones.

    With `is_joined` the rank joins the prepared group next. Otherwise another layout is wanted by
    now: the tasks stay where they are while the next migration may take them (`stays_parked`), or
    else the rank applies the plan of `directive` to them now.
    """

    epoch: int
    is_committed: bool
    stays_parked: bool
    is_joined: bool
    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Join:
    """Select the prepared objects of the group's mode; a follower also reads the step queue."""

    binding: Binding
    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Serve:
    """Reduce the lease to `retention`, lease (dp: own) `grant_pages` more pages, and serve."""

    binding: Binding
    grant_pages: int
    retention: LeaseRetention | None
    directive: Directive = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ack:
    """The group does not change: adopt the stage without stopping."""

    stage: Stage
    directive: Directive = field(repr=False)


Move = Leave | Park | Reshard | Resolve | Join | Serve | Ack
