"""The values that messages are made of and that both sides of the protocol decide with.

Identifiers, phases and stages, carry plans, tiers, bindings and targets. Pure.
"""

from enum import IntEnum, StrEnum
from typing import NewType

import msgspec

from comm_pool.layout import Group, Layout, Rank

Epoch = NewType("Epoch", int)
"""The number of a layout; it only grows."""
TaskId = NewType("TaskId", str)
"""The request id of vLLM's front end; unique over gateways."""


class Phase(IntEnum):
    """How far a rank is on its way into an epoch."""

    PARK = 0
    """The rank has stopped at a safe point and is bound to no group that the layout changes."""
    MOVE = 1
    """Ranks copy the KV of parked tasks to the ranks that continue them; only RESHARD has this
    phase."""
    SWAP = 2
    """Ranks select the target group's prepared objects and followers read its queue; no steps
    yet."""
    SERVE = 3
    """The group may step."""


class Stage(msgspec.Struct, frozen=True, order=True):
    """The total order of all states that a rank can be directed to; the later one always wins."""

    epoch: int
    phase: Phase


class Carry(StrEnum):
    """What a switch does to the running tasks of the groups that it changes."""

    PAUSE = "pause"
    DRAIN = "drain"
    RECOMPUTE = "recompute"
    RESHARD = "reshard"
    SPECULATE = "speculate"
    """Groups serve until their old tasks end, and idle groups begin new tasks; then `RESHARD`."""


PLAN_AFTER_WAIT = {Carry.DRAIN: Carry.RECOMPUTE, Carry.SPECULATE: Carry.RESHARD}
"""Plan that waits for tasks to end -> plan for the rest of them after `drain_limit_ms`."""


class Tier(IntEnum):
    """Priority classes; lower is more urgent, as in vLLM's scheduler."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


class Binding(msgspec.Struct, frozen=True):
    """A group and the epoch in which it was formed; messages of an older formation are stale.

    A group that a switch does not change keeps its formation and serves through that switch.
    """

    group: Group
    formation: int


class Target(msgspec.Struct, frozen=True):
    """A layout with the formation epoch of each of its groups.

    `reserved` are the (leader, n) of groups that are for tasks of the n most urgent tiers when the
    target is chosen: a migration puts these tasks there, and others elsewhere.
    """

    bindings: tuple[Binding, ...]
    reserved: tuple[tuple[Rank, int], ...] = ()

    @property
    def layout(self) -> Layout:
        """The layout without its formation epochs."""
        return Layout(tuple(binding.group for binding in self.bindings))

    def binding_of(self, rank: Rank) -> Binding | None:
        """The binding that holds `rank`, or None if the rank is not in the layout."""
        for binding in self.bindings:
            if rank in binding.group.ranks:
                return binding
        return None


class EndCause(StrEnum):
    """Why a task ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"


class ReturnCause(StrEnum):
    """Why a leader gave a task back to the pool instead of finishing it."""

    NOT_STARTED = "not_started"
    """It held no KV when its group parked."""
    RECOMPUTE = "recompute"
    """Its KV was dropped on purpose; its prefill restarts with the tokens that it has."""
    STALE = "stale"
    """It was placed in a group that no longer exists."""
