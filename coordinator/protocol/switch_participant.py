"""The rank's side of the switch protocol: when to stop, what to join, when it may step.

Invariant: `stage` never goes back, and a rank leaves a group only when no step of that group can
still need it: a leader at its own safe point, a follower after it has read the leader's leave
message or knows that the leader is gone. The rank's process calls this module and carries out the
actions.
"""

from typing import assert_never

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
from coordinator.protocol.switch_rules import TABLE, Action, IllegalEventError
from coordinator.protocol.switch_situation import Situation
from coordinator.protocol.switch_state import Joined, SwitchState
from coordinator.protocol.terms import Binding, Carry, Phase, Stage

__all__ = ["KEEPING", "Joined", "SwitchParticipant"]

KEEPING = frozenset({Carry.PAUSE, Carry.RESHARD})
"""Plans under which parked tasks keep their KV: their last step may end after the leave."""


class SwitchParticipant(SwitchState):
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

    __slots__ = ()

    table = TABLE
    """What the rank does at a safe point, and which actions are legal where."""

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
        it leave again. `for_move`: the leader has parked its tasks for a migration; only a follower
        reads this, and any other rank raises `IllegalEventError`.
        """
        if for_move and not self.is_follower:
            raise IllegalEventError(f"{self!r} follows no leader that leaves for a migration")
        if self.binding is None or formation >= self.binding.formation:
            self.leaves[formation] = for_move or self.leaves.get(formation, False)

    def next_move(self, *, idle: bool) -> Move | None:
        """Return the action to take at this safe point, or None; changes nothing.

        `idle`: the group that this rank leads has no unfinished task, so a drain is over. Raises
        `IllegalEventError` where the table has no rule.
        """
        if self.wanted is None:
            return None
        now = Situation(self, self.wanted, idle)
        action = self.table.action(now.case, now.is_true)
        return now.move(action) if action is not Action.WAIT else None

    def made(self, move: Move) -> None:
        """Record that the shell carried out `move`, the last action that `next_move` returned.

        Raises `IllegalEventError`, and changes nothing, if the action cannot follow here.
        """
        self._check(move)
        match move:
            case Leave(directive=directive):
                if move.carry is Carry.RESHARD and not move.group_lost:
                    self.migration = directive.stage.epoch
                self._park(directive)
            case Park(directive=directive):
                self._park(directive)
            case Reshard(directive=directive):
                self.migration, self.copied = directive.stage.epoch, directive
                self._acknowledge(directive.stage, directive)
            case Resolve(directive=directive):
                self.migration = directive.stage.epoch if move.stays_parked else None
                if move.is_joined and directive.stage.epoch > move.epoch and self.copied:
                    self.promised = self.copied.target.binding_of(self.rank)
            case Join(binding=binding, directive=directive):
                self.promised = None
                self._join(binding, directive)
            case Serve(directive=directive):
                self.serving = True
                self._acknowledge(directive.stage, directive)
            case Ack(stage=stage, directive=directive):
                self._acknowledge(stage, directive)
            case _:
                assert_never(move)

    def _check(self, move: Move) -> None:
        """Raise `IllegalEventError` unless this action may have been carried out here."""
        match move:
            case Leave(binding=binding) | Serve(binding=binding):
                fits = binding == self.binding
            case Join(binding=binding):
                fits = self.rank in binding.group.ranks
            case Resolve(epoch=epoch):
                fits = epoch == self.migration
            case _:
                fits = True
        stage = _stage_after(move)
        is_back = stage is not None and stage < self.stage
        if not fits or is_back or not self.table.gives(self.position, ACTIONS[type(move)]):
            raise IllegalEventError(f"{self!r} cannot have carried out {move}")

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

    def _park(self, directive: Directive) -> None:
        self.binding = self._joined = None
        self.serving = False
        self._acknowledge(Stage(directive.stage.epoch, Phase.PARK), directive)

    def _join(self, binding: Binding, directive: Directive) -> None:
        members = dict(directive.members)
        self.binding = binding
        self.serving = False
        self.members = {rank: members.get(rank) for rank in binding.group.ranks}
        self._joined = binding, self.members
        leaves = self.leaves.items()
        self.leaves = {
            formation: for_move for formation, for_move in leaves if formation >= binding.formation
        }
        self._acknowledge(Stage(directive.stage.epoch, Phase.SWAP), directive)

    def _acknowledge(self, stage: Stage, directive: Directive) -> None:
        self.stage = stage
        self.target = directive.target


def _order(directive: Directive) -> tuple[Stage, int]:
    return directive.stage, directive.answers_ms


ACTIONS: dict[type[Move], tuple[Action, ...]] = {
    Leave: (Action.LEAVE, Action.LEAVE_RECOMPUTE),
    Park: (Action.PARK,),
    Reshard: (Action.RESHARD,),
    Resolve: (Action.RESOLVE, Action.RESOLVE_PARKED, Action.RESOLVE_JOINED),
    Join: (Action.JOIN, Action.JOIN_PROMISED),
    Serve: (Action.SERVE,),
    Ack: (Action.ACK,),
}
"""Type of an action -> what the table calls it."""


def _stage_after(move: Move) -> Stage | None:
    """Return the stage that an action acknowledges; `Resolve` acknowledges none."""
    match move:
        case Resolve():
            return None
        case Leave() | Park():
            return Stage(move.directive.stage.epoch, Phase.PARK)
        case Join():
            return Stage(move.directive.stage.epoch, Phase.SWAP)
        case Ack(stage=stage):
            return stage
        case _:
            return move.directive.stage
