"""The rank's side of the switch protocol: when to stop, what to join, when it may step.

Invariant: `stage` never goes back, and a rank leaves a group only when no step of that group can
still need it: a leader at its own safe point, a follower after it has read the leader's leave
message or knows that the leader is gone. The rank's process calls this module and carries out the
actions.
"""

from collections.abc import Mapping
from typing import assert_never

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
from coordinator.protocol.terms import PLAN_AFTER_WAIT, Binding, Carry, Phase, Stage, Target

MOVING = frozenset({Carry.RESHARD, Carry.SPECULATE})
"""Plans that end in a migration: parked tasks stay where they are, and no rank joins before it."""

Joined = tuple[Binding, Mapping[Rank, int | None]]
"""A formation and the incarnations that its members had when this rank joined it."""

KEEPING = frozenset({Carry.PAUSE, Carry.RESHARD})
"""Plans under which parked tasks keep their KV: their last step may end after the leave."""


class SwitchParticipant:
    """One incarnation of one rank in the switch protocol.

    Call `on_directive` and `on_leave` as messages arrive. At a safe point call `next_move`, carry
    out the action, call `made`, and repeat until there is none. A leader steps while `may_step`.

    - A leader is at a safe point when every step that it sent is complete. With a new directive it
      asks before it sends another step. A follower asks between any two steps, but carries out
      `Leave` only after it has read everything that its leader sent.
    - A leader that waits for room in the step queue gives up the step when its time lease ends.
    - A message on the step queue carries its formation; readers drop those of other formations.
    - A follower takes its page lease from the leader's first message of a formation (formation,
      grant, retention), which the leader sends on `Serve`. Steps may reach a follower before its
      own SERVE directive, which may never arrive. `Serve` of a follower repeats the message and
      changes nothing.
    - A rank that is joined to nothing drops the messages on the queues of its groups, so that the
      queues never fill, and passes leave messages to `on_leave`. While a migration is undecided it
      drops nothing: messages may be addressed to the group that it is about to join.
    - When nothing has to be migrated, a parked rank joins its next group at once: no rank steps
      before all have joined, and no leave message is needed until then. A directive names a
      formation that will never be led (`abandoned_formation`): a leader that has not heard of it
      cannot send the leave message.
    - After a committed migration, groups begin at once. A follower may hear of the commit when its
      leader is already in a step with it and another layout is wanted. It still joins, and then
      leaves as above.
    - A step that fails because a member died ends the formation: call `on_leave` at every survivor.
    - With `group_lost` the leave message is sent only if the queue has room: it may have no reader.
    """

    __slots__ = (
        "_copied",
        "_joined",
        "_leaves",
        "_members",
        "_migration",
        "_promised",
        "binding",
        "incarnation",
        "lease_until",
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
        self._members: dict[Rank, int | None] = {}
        """Incarnations of the binding's ranks when this rank joined it."""
        self._joined: Joined | None = None
        self._leaves: dict[int, bool] = {}
        """Formations whose leader has left -> whether it parked its tasks for a migration. A rank
        is in at most one formation per epoch."""
        self._migration: int | None = None
        """The epoch whose migration takes, or may take, the tasks that this rank parked for it."""
        self._copied: Directive | None = None
        """The directive of the last migration that this rank acknowledged."""
        self._promised: Binding | None = None
        """A group that this follower must join because its leader may already serve."""

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
        return self.binding is not None and self.binding.formation in self._leaves

    @property
    def known_migration(self) -> tuple[int, int]:
        """The last committed migration that this rank knows of, and the epoch of that directive."""
        wanted = self.wanted
        return (wanted.moved, wanted.stage.epoch) if wanted is not None else (0, 0)

    @property
    def is_moving(self) -> bool:
        """A migration may still take the tasks that this rank parked."""
        return self._migration is not None

    @property
    def may_drain(self) -> bool:
        """The rank is joined to nothing, and waits for no outcome of a migration."""
        waits = self.is_moving and self.stage.phase is Phase.MOVE
        return self.binding is None and not waits

    def may_step(self, now_ms: int) -> bool:
        """Return whether this rank may start a step of its group."""
        return self.is_leader and self.serving and now_ms < self.lease_until

    def on_directive(self, directive: Directive) -> None:
        """Renew the time lease if that is safe, and keep the highest directive.

        At equal stages the newer directive replaces the older one, for its carry plan, retained
        leases and members.
        """
        if directive.incarnation != self.incarnation:
            return
        if self._may_renew(directive):
            self.lease_until = max(self.lease_until, directive.answers_ms + directive.lease_ms)
        held = self.wanted
        if held is None or _order(directive) >= _order(held):
            self.wanted = directive

    def on_leave(self, formation: int, *, for_move: bool = False) -> None:
        """Record that the leader left `formation`; older formations are ignored.

        A parked rank may receive this before the directive that makes it join; the record then lets
        it leave again. `for_move`: the leader has parked its tasks for a migration.
        """
        if self.binding is None or formation >= self.binding.formation:
            self._leaves[formation] = for_move or self._leaves.get(formation, False)

    def next_move(self, *, idle: bool) -> Move | None:
        """Return the action to take at this safe point, or None; changes nothing.

        `idle`: the group that this rank leads has no unfinished task, so a drain is over.
        """
        wanted = self.wanted
        if wanted is None or not self._is_due(wanted):
            return None
        to_be = wanted.target.binding_of(self.rank)
        if self._promised is not None and self._copied is not None:
            return Join(self._promised, self._copied)
        if self.binding is not None and self.binding != to_be:
            return self._leave(wanted, self.binding, idle)
        if self._migration is not None and wanted.stage > Stage(self._migration, Phase.MOVE):
            return self._resolve(wanted, self._migration)
        if self.binding is not None:
            return self._stay(wanted, self.binding)
        if to_be is None:
            # Cut out: the rank joins nothing in any phase, and no peer waits for its
            # acknowledgement.
            is_new = wanted.stage.epoch > self.stage.epoch
            return Park(wanted) if is_new else Ack(wanted.stage, wanted)
        match wanted.stage.phase:
            case Phase.PARK if wanted.carry in MOVING:
                return Park(wanted)
            case Phase.MOVE:
                return Reshard(wanted) if self.rank in wanted.movers else Ack(wanted.stage, wanted)
            case _:
                return Join(to_be, wanted)

    def made(self, move: Move) -> None:
        """Record that the shell carried out `move`, the last action that `next_move` returned."""
        match move:
            case Leave(directive=directive):
                if move.carry is Carry.RESHARD and not move.group_lost:
                    self._migration = directive.stage.epoch
                self._park(directive)
            case Park(directive=directive):
                self._park(directive)
            case Reshard(directive=directive):
                self._migration, self._copied = directive.stage.epoch, directive
                self._acknowledge(directive.stage, directive)
            case Resolve(directive=directive):
                self._migration = directive.stage.epoch if move.stays_parked else None
                if move.is_joined and directive.stage.epoch > move.epoch and self._copied:
                    self._promised = self._copied.target.binding_of(self.rank)
            case Join(binding=binding, directive=directive):
                self._promised = None
                self._join(binding, directive)
            case Serve(directive=directive):
                self.serving = True
                self._acknowledge(directive.stage, directive)
            case Ack(stage=stage, directive=directive):
                self._acknowledge(stage, directive)
            case _:
                assert_never(move)

    def _may_renew(self, directive: Directive) -> bool:
        """Return whether the group that this rank leads is sure to exist still.

        If the time lease had lapsed when the answered report was sent, the coordinator may have cut
        the rank out and its followers may be gone, even if the rank is back in the target by now.
        Only a target with the same formation proves the opposite. A coordinator that has just
        started has no target and knows nothing.
        """
        if self.binding is None or directive.answers_ms < self.lease_until:
            return True
        target = directive.target
        return directive.stage.epoch > 0 and target.binding_of(self.rank) == self.binding

    def _is_due(self, wanted: Directive) -> bool:
        """Return whether the directive asks for an action.

        A different layout of an acknowledged epoch asks for nothing: only a coordinator that
        restarted without hearing of that epoch sends one, and it raises its epoch when it reads
        this rank's report.
        """
        is_foreign = wanted.stage.epoch == self.stage.epoch and wanted.target != self.target
        return not is_foreign and (wanted.stage > self.stage or self._may_join_early(wanted))

    def _may_join_early(self, wanted: Directive) -> bool:
        """Return whether this rank is parked and nothing has to be migrated before it joins."""
        is_parked = self.binding is None and self._migration is None
        is_known = wanted.stage == self.stage == Stage(self.stage.epoch, Phase.PARK)
        may_join = wanted.carry not in MOVING and wanted.target.binding_of(self.rank) is not None
        return is_parked and is_known and may_join

    def _resolve(self, wanted: Directive, epoch: int) -> Resolve:
        copied = self._copied
        if copied is None or not wanted.moved == epoch == copied.stage.epoch:
            copied = None
        is_joined = copied is not None and self._is_awaited(copied, wanted)
        may_move = wanted.carry in MOVING and wanted.stage.phase <= Phase.MOVE
        stays_parked = may_move and not is_joined
        return Resolve(epoch, copied is not None, stays_parked, is_joined, wanted)

    def _is_awaited(self, copied: Directive, wanted: Directive) -> bool:
        """Return whether the prepared group is wanted, or its leader may be in a step of it."""
        binding = copied.target.binding_of(self.rank)
        if wanted.stage.epoch == copied.stage.epoch or binding is None:
            return binding is not None
        # A leader in a step with a lost process gets out of it by other means.
        then, now = dict(copied.members), dict(wanted.members)
        ranks = binding.group.ranks
        return ranks[0] != self.rank and all(now.get(rank) == then.get(rank) for rank in ranks)

    def _leave(self, wanted: Directive, binding: Binding, idle: bool) -> Leave | None:
        gone = self._gone(wanted, binding)
        # After a lapsed time lease the group can run no step, so there is nothing to wait for.
        is_lost = bool(gone) or (self.is_leader and wanted.answers_ms >= self.lease_until)
        is_drained = wanted.carry is Carry.DRAIN and idle
        carry = wanted.carry
        if self.is_leader:
            if not self.serving and not is_drained:
                # No task ends in a group that never served, so its leader does not wait for any.
                carry = PLAN_AFTER_WAIT.get(carry, carry)
            may_leave = is_lost or carry not in PLAN_AFTER_WAIT or is_drained
        else:
            may_leave = (
                self._is_over(binding, gone) or wanted.abandoned_formation == binding.formation
            )
        if not may_leave:
            return None
        if carry in MOVING and self._leaves.get(binding.formation, False):
            # The leader may have heard before this rank that all other groups have drained.
            carry = Carry.RESHARD
        return Leave(binding, carry, self.is_leader, is_lost, wanted)

    def _is_over(self, binding: Binding, gone: frozenset[Rank]) -> bool:
        """The leader will send no further step of the formation."""
        return self.has_leave or binding.group.leader in gone

    def _gone(self, wanted: Directive, binding: Binding) -> frozenset[Rank]:
        """Members of the joined group that are cut out, or whose process is a new one."""
        members = dict(wanted.members)
        return frozenset(
            rank
            for rank in binding.group.ranks
            if wanted.target.binding_of(rank) is None or members.get(rank) != self._members[rank]
        )

    def _stay(self, wanted: Directive, binding: Binding) -> Serve | Ack | None:
        if self.serving or wanted.stage.phase is not Phase.SERVE:
            return Ack(wanted.stage, wanted)
        ranks = binding.group.ranks
        granted = [grant.pages for grant in wanted.grants if grant.ranks == ranks]
        if not granted:
            return None
        retention = next((each for each in wanted.retentions if each.ranks == ranks), None)
        return Serve(binding, granted[0], retention, wanted)

    def _park(self, directive: Directive) -> None:
        self.binding = self._joined = None
        self.serving = False
        self._acknowledge(Stage(directive.stage.epoch, Phase.PARK), directive)

    def _join(self, binding: Binding, directive: Directive) -> None:
        members = dict(directive.members)
        self.binding = binding
        self.serving = False
        self._members = {rank: members.get(rank) for rank in binding.group.ranks}
        self._joined = binding, self._members
        leaves = self._leaves.items()
        self._leaves = {
            formation: for_move for formation, for_move in leaves if formation >= binding.formation
        }
        self._acknowledge(Stage(directive.stage.epoch, Phase.SWAP), directive)

    def _acknowledge(self, stage: Stage, directive: Directive) -> None:
        assert stage >= self.stage, f"rank {self.rank} would go back from {self.stage} to {stage}."
        self.stage = stage
        self.target = directive.target


def _order(directive: Directive) -> tuple[Stage, int]:
    return directive.stage, directive.answers_ms
