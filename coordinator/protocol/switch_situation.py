"""What a directive means to a rank: the columns of the table, and actions with their fields."""

from collections.abc import Callable
from dataclasses import dataclass

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.switch_actions import (
    Ack,
    Join,
    Leave,
    Move,
    Park,
    Reshard,
    Resolve,
    Serve,
)
from coordinator.protocol.switch_rules import (
    Action,
    Asks,
    Case,
    Fact,
    IllegalEventError,
    Position,
    Wanted,
)
from coordinator.protocol.switch_state import SwitchState
from coordinator.protocol.terms import Binding, Carry, Phase, Stage


@dataclass(frozen=True, slots=True)
class Situation:
    """A rank at a safe point, and the highest directive that it has read."""

    rank: SwitchState
    wanted: Directive
    idle: bool
    """The group that the rank leads has no unfinished task."""

    @property
    def case(self) -> Case:
        """The first five columns of the table."""
        wanted = self.wanted
        return self.rank.position, self._asks, self._wants, wanted.stage.phase, wanted.carry

    def is_true(self, fact: Fact) -> bool:
        """Return whether a fact holds."""
        return FACTS[fact](self)

    def move(self, action: Action) -> Move:
        """Return the action with its fields; the table must have given it here."""
        return MOVES[action](self)

    @property
    def _asks(self) -> Asks:
        rank, stage = self.rank, self.wanted.stage
        is_foreign = stage.epoch == rank.stage.epoch and self.wanted.target != rank.target
        if is_foreign or stage < rank.stage:
            return Asks.NOTHING
        if stage == rank.stage:
            return Asks.SAME_STAGE
        epoch = rank.migration if rank.position is Position.UNDECIDED else None
        is_decided = epoch is not None and stage > Stage(epoch, Phase.MOVE)
        return Asks.OUTCOME if is_decided else Asks.LATER_STAGE

    @property
    def _wants(self) -> Wanted:
        if self.to_be is None:
            return Wanted.NO_GROUP
        return Wanted.SAME_GROUP if self.to_be == self.rank.binding else Wanted.OTHER_GROUP

    @property
    def to_be(self) -> Binding | None:
        """The group that the target wants the rank in."""
        return self.wanted.target.binding_of(self.rank.rank)

    @property
    def joined(self) -> Binding:
        """The group that the rank is joined to; only rows of joined ranks ask."""
        binding = self.rank.binding
        assert binding is not None
        return binding

    @property
    def gone(self) -> frozenset[Rank]:
        """Members of the joined group that are cut out, or whose process is a new one."""
        target, now = self.wanted.target, dict(self.wanted.members)
        return frozenset(
            rank
            for rank, incarnation in self.rank.members.items()
            if target.binding_of(rank) is None or now.get(rank) != incarnation
        )

    @property
    def has_lapsed(self) -> bool:
        """The time lease had lapsed when the answered report was sent."""
        return self.wanted.answers_ms >= self.rank.lease_until

    @property
    def copies_early(self) -> bool:
        """KV is to be copied while groups serve; this one does, and no member of it is lost."""
        is_asked = self.wanted.precopy is not None and self.rank.serving
        return is_asked and not (self.gone or self.has_lapsed)

    @property
    def has_read_leave(self) -> bool:
        """The leader of the joined group has left it, and this rank has heard why.

        A leader that parked its tasks for a migration may have heard first that no group waits for
        tasks any more. A follower that left under SPECULATE would leave its pages out.
        """
        for_move = self.rank.leaves.get(self.joined.formation)
        return for_move is not None and not (for_move and self.wanted.carry is Carry.SPECULATE)

    @property
    def granted(self) -> int | None:
        """The pages that the directive grants to the joined group."""
        ranks = self.joined.group.ranks
        return next((grant.pages for grant in self.wanted.grants if grant.ranks == ranks), None)

    @property
    def committed(self) -> Directive | None:
        """The directive under which the rank copied, if that migration is committed."""
        copied, epoch = self.rank.copied, self.rank.migration
        is_own = copied is not None and copied.stage.epoch == epoch
        return copied if is_own and self.wanted.moved == epoch else None

    @property
    def prepared(self) -> Binding | None:
        """The group that a committed migration prepared for the rank."""
        copied = self.committed
        return copied.target.binding_of(self.rank.rank) if copied is not None else None

    @property
    def is_overtaken(self) -> bool:
        """A later epoch is wanted than that of the migration."""
        return self.wanted.stage.epoch != self.rank.migration

    @property
    def is_in_step(self) -> bool:
        """Another rank leads the prepared group, and all its processes are still the same.

        A leader in a step with a lost process gets out of it by other means.
        """
        copied, binding = self.committed, self.prepared
        if copied is None or binding is None or binding.group.leader == self.rank.rank:
            return False
        then, now = dict(copied.members), dict(self.wanted.members)
        return all(now.get(rank) == then.get(rank) for rank in binding.group.ranks)

    def leave(self, carry: Carry) -> Leave:
        """Leave the joined group under a carry plan."""
        is_leader = self.rank.is_leader
        # After a lapsed time lease the followers may be gone.
        is_lost = bool(self.gone) or (is_leader and self.has_lapsed)
        return Leave(self.joined, carry, is_leader, is_lost, self.wanted)

    def resolve(self, *, stays_parked: bool = False, is_joined: bool = False) -> Resolve:
        """Tell the outcome of the rank's migration."""
        epoch, is_committed = self.rank.migration, self.committed is not None
        assert epoch is not None
        return Resolve(epoch, is_committed, stays_parked, is_joined, self.wanted)

    def join(self) -> Join:
        """Join the wanted group."""
        assert self.to_be is not None
        return Join(self.to_be, self.wanted)

    def join_promised(self) -> Join:
        """Join the group that a committed migration prepared, as its directive wanted it."""
        promised, copied = self.rank.promised, self.rank.copied
        assert promised is not None and copied is not None
        return Join(promised, copied)

    def serve(self) -> Serve:
        """Serve with the granted pages; raises `IllegalEventError` if SERVE grants none."""
        pages, key = self.granted, self.joined.group.lease_key
        if pages is None:
            raise IllegalEventError(f"SERVE grants no pages to {self.joined.group.name}")
        retention = next((each for each in self.wanted.retentions if each.ranks == key), None)
        return Serve(self.joined, pages, retention, self.wanted)


FACTS: dict[Fact, Callable[[Situation], bool]] = {
    Fact.COPIES_EARLY: lambda now: now.copies_early,
    Fact.IDLE_DRAIN: lambda now: now.wanted.carry is Carry.DRAIN and now.idle,
    Fact.MEMBER_GONE: lambda now: bool(now.gone),
    Fact.LEADER_GONE: lambda now: now.joined.group.leader in now.gone,
    Fact.LEASE_LAPSED: lambda now: now.has_lapsed,
    Fact.LEAVE_READ: lambda now: now.has_read_leave,
    Fact.ABANDONED: lambda now: now.wanted.abandoned_formation == now.joined.formation,
    Fact.NEW_EPOCH: lambda now: now.wanted.stage.epoch > now.rank.stage.epoch,
    Fact.MOVER: lambda now: now.rank.rank in now.wanted.movers,
    Fact.PREPARED_WANTED: lambda now: now.prepared is not None and not now.is_overtaken,
    Fact.PREPARED_IN_STEP: lambda now: now.is_in_step and now.is_overtaken,
}

MOVES: dict[Action, Callable[[Situation], Move]] = {
    Action.LEAVE: lambda now: now.leave(now.wanted.carry),
    Action.LEAVE_RECOMPUTE: lambda now: now.leave(Carry.RECOMPUTE),
    Action.PARK: lambda now: Park(now.wanted),
    Action.RESHARD: lambda now: Reshard(now.wanted),
    Action.RESOLVE: lambda now: now.resolve(),
    Action.RESOLVE_PARKED: lambda now: now.resolve(stays_parked=True),
    Action.RESOLVE_JOINED: lambda now: now.resolve(is_joined=True),
    Action.JOIN: lambda now: now.join(),
    Action.JOIN_PROMISED: lambda now: now.join_promised(),
    Action.SERVE: lambda now: now.serve(),
    Action.ACK: lambda now: Ack(now.wanted.stage, now.wanted),
}
