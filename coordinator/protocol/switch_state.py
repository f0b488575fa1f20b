"""What a rank remembers of the switch protocol, and what follows from that alone."""

from collections.abc import Mapping

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.switch_rules import Position
from coordinator.protocol.terms import Binding, Phase, Stage, Target

Joined = tuple[Binding, Mapping[Rank, int | None]]
"""A formation and the incarnations that its members had when this rank joined it."""


class SwitchState:
    """The state of one incarnation of one rank; `SwitchParticipant` changes it."""

    __slots__ = (
        "_joined",
        "binding",
        "copied",
        "incarnation",
        "lease_until",
        "leaves",
        "members",
        "migration",
        "promised",
        "rank",
        "serving",
        "stage",
        "target",
        "wanted",
    )

    def __init__(self, rank: Rank, incarnation: int) -> None:
        """Start parked in epoch 0, which no layout has."""
        self.rank = rank
        self.incarnation = incarnation
        self.stage = Stage(0, Phase.PARK)
        """The highest acknowledged stage."""
        self.binding: Binding | None = None
        """The group that the rank is joined to, and its formation."""
        self.target: Target | None = None
        """The target of the last acknowledged stage."""
        self.serving = False
        """The rank has acknowledged SERVE of the binding."""
        self.wanted: Directive | None = None
        """The highest directive so far."""
        self.lease_until = -1
        """End of the time lease, on this rank's clock."""
        self.members: dict[Rank, int | None] = {}
        """Incarnations of the binding's ranks when this rank joined it."""
        self._joined: Joined | None = None
        self.leaves: dict[int, bool] = {}
        """Formations whose leader has left -> whether it parked its tasks for a migration. A rank
        is in at most one formation per epoch."""
        self.migration: int | None = None
        """The epoch whose migration takes, or may take, the tasks that this rank parked for it."""
        self.copied: Directive | None = None
        """The directive of the last migration that this rank acknowledged."""
        self.promised: Binding | None = None
        """A group that this follower must join because its leader may already serve."""

    def __repr__(self) -> str:
        """Return one line: rank, stage, position, group with its formation, and wanted plan."""
        stage = f"{self.stage.epoch}.{self.stage.phase.name}"
        binding = self.binding
        group = f"{binding.group.name}@{binding.formation}" if binding is not None else "no group"
        plan = self.wanted.carry.value if self.wanted is not None else "no plan"
        return f"<rank {self.rank}: {stage} {self.position.name} {group} {plan}>"

    @property
    def position(self) -> Position:
        """Where the rank is, for the table."""
        if self.is_leader:
            return Position.SERVING_LEADER if self.serving else Position.JOINED_LEADER
        if self.is_follower:
            return Position.SERVING_FOLLOWER if self.serving else Position.JOINED_FOLLOWER
        if self.promised is not None:
            return Position.PROMISED
        return Position.UNDECIDED if self.migration is not None else Position.PARKED

    @property
    def joined(self) -> Joined | None:
        """The formation that the rank is joined to, with its members' incarnations at that time.

        Other threads may read it: both halves are replaced at once.
        """
        return self._joined

    @property
    def is_leader(self) -> bool:
        """The rank leads the group that it is joined to; always true in dp."""
        return self.binding is not None and self.binding.group.leader == self.rank

    @property
    def is_follower(self) -> bool:
        """The rank is joined to a group that another rank leads."""
        return self.binding is not None and self.binding.group.leader != self.rank

    @property
    def has_leave(self) -> bool:
        """The leader of the joined group has left it: only a directive can come next."""
        return self.binding is not None and self.binding.formation in self.leaves

    @property
    def known_migration(self) -> tuple[int, int]:
        """The last committed migration that this rank knows of, and the epoch of that directive."""
        wanted = self.wanted
        return (wanted.moved, wanted.stage.epoch) if wanted is not None else (0, 0)

    @property
    def is_moving(self) -> bool:
        """A migration may still take the tasks that this rank parked."""
        return self.migration is not None

    @property
    def precopy(self) -> Directive | None:
        """The directive that asks this rank to copy KV while its group serves."""
        wanted = self.wanted
        if wanted is None or wanted.precopy is None or not self.serving:
            return None
        is_asked = wanted.stage > self.stage and wanted.target.binding_of(self.rank) is not None
        return wanted if is_asked and not self.stays else None

    @property
    def stays(self) -> bool:
        """The wanted target has the formation that this rank is joined to."""
        return self.wanted is not None and self.binding in self.wanted.target.bindings

    @property
    def may_drain(self) -> bool:
        """The rank is joined to nothing, and waits for no outcome of a migration."""
        waits = self.is_moving and self.stage.phase is Phase.MOVE
        return self.binding is None and not waits

    def may_step(self, now_ms: int) -> bool:
        """Return whether this rank may start a step of its group."""
        return self.is_leader and self.serving and now_ms < self.lease_until
