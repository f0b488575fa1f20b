"""The steps that are open in the world, and who may start one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from comm_pool.layout import Rank
from coordinator.protocol.terms import Binding
from tests.simulation.checkers import Violation, check, check_one_leads
from tests.simulation.stepping import ABORT_AFTER_TICKS, Step

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank
    from tests.simulation.world import World


class OpenSteps:
    """Steps that are not complete, each with its members."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._open: dict[Step, tuple[SimRank, ...]] = {}

    def fail_dead(self) -> None:
        """Fail the steps that a dead member will never execute."""
        self._open = {step: members for step, members in self._open.items() if not step.is_over}
        for step, members in self._open.items():
            if not self._lacks_one(step):
                continue
            since = step.dead_since if step.dead_since is not None else self._world.now
            step.dead_since = since
            step.failed = self._world.now - since >= ABORT_AFTER_TICKS
            if step.failed and self._world.faults.drains:
                self._let_out(step, members)
            elif step.failed and self._world.faults.spins:
                self._kill_stuck(step, members)

    def forsake(self, step: Step, rank: Rank) -> None:
        """A member has come out of it, as it had no room for it: it counts for nobody."""
        if not step.is_over:
            step.arrived.discard(rank)
        if step.dead_since is None:
            step.dead_since = self._world.now

    def _lacks_one(self, step: Step) -> bool:
        return any(self._does_not_come(member, step) for member in self._open[step])

    def _does_not_come(self, member: "SimRank", step: Step) -> bool:
        if self._is_lost(member):
            return True
        if (since := member.room.lacked_since(step.formation)) is not None:
            # Wherever the rank has gone meanwhile, the others hear of it only if it is cut out.
            return member.cut_out_at >= since or not self._world.faults.drains
        return _stays_away(member, step)

    def _is_lost(self, member: "SimRank") -> bool:
        """It is dead; or it stands still, and the others are told to do without it."""
        if self._world.ranks[member.rank] is not member:
            return True
        stands_still = self._world.now < member.stopped_until
        return self._world.faults.drains and stands_still and self._is_cut_out(member)

    def _is_cut_out(self, member: "SimRank") -> bool:
        core = self._world.core
        return core is not None and not (
            core.views.is_recovering or core.views.is_available(member.rank)
        )

    def _let_out(self, step: Step, members: tuple["SimRank", ...]) -> None:
        """Those inside come out of the step, which does not count, and of their group for good."""
        for member in members:
            if member.rank in step.arrived and not self._does_not_come(member, step):
                self._world.stats.closed += 1
                member.closed.add(step.binding.group.ranks)

    def _kill_stuck(self, step: Step, members: tuple["SimRank", ...]) -> None:
        """Collectives with a dead peer never end: the watchdogs of those inside end them."""
        for member in members:
            is_inside = member.rank in step.arrived and not _had_no_room(member, step)
            if is_inside and self._world.ranks[member.rank] is member:
                self._world.stats.stuck += 1
                self._world.faults.kill(self._world, member.rank)

    def check_may_start(self, leader: "SimRank", step: Step) -> None:
        """A leader sends a step: all members must be in the formation, and it must be wanted.

        Or about to join it: what waits for the outcome of a move into it does.
        """
        self._world.stats.steps += 1
        ranks = step.binding.group.ranks
        self._world.stats.reunited += leader.cohort > 0 and len(ranks) > 1
        incarnations = leader.holdings.members(ranks)
        members = []
        for rank in ranks:
            process = self._world.ranks[rank]
            if process is None or process.incarnation != incarnations[rank]:
                step.dead_since = self._world.now
                continue
            if _does_without(process, step.binding, incarnations):
                # The leader is about to hear that the group is none any more.
                step.dead_since = self._world.now
                continue
            members.append(process)
            check(ranks not in process.closed, f"rank {rank} is in a group that it has closed")
            has_joined = (rank, process.incarnation) in self._world.memory.joined
            self._world.stats.rejoined += has_joined and len(ranks) > 1
            if not (_is_in_or_comes(process, step.binding) or _had_no_room(process, step)):
                where = process.participant.binding
                raise Violation(f"rank {leader.rank} steps in {step.binding}, {rank} is in {where}")
        for other in self._world.alive:
            check_one_leads(step, leader, other, self._world.gateways)
        core = self._world.core
        if core is not None and not core.views.is_recovering:
            # Who computes wrongly is left out while its lease lasts; its tokens are fenced off.
            check(
                core.views.is_available(leader.rank) or core._roster.guard.is_wrong(leader.rank),
                f"rank {leader.rank} starts a step although it is cut out",
            )
        if step.dead_since is not None:
            # A member died before the step began; nobody can tell that from one that is slow.
            dead = type(leader)(self._world, leader.rank, -1, ())
            members.append(dead)
        self._open[step] = tuple(members)

    def check_nobody_waits_for(self, follower: "SimRank", binding: Binding) -> None:
        """A follower leaves: its leader must not wait for it in a step that does not fail.

        The step may have begun in this tick, so what it lacks is asked now. A follower that had no
        room tells of it until the others come out; if they never do, the cell comes to no rest.
        """
        leader = self._world.ranks[binding.group.leader]
        engine = leader.holdings.engine if leader is not None else None
        for step in engine.in_flight if engine is not None else ():
            check(
                step.binding != binding
                or step.is_over
                or follower.rank in step.arrived
                or _had_no_room(follower, step)
                or self._lacks_one(step),
                f"rank {follower.rank} left {binding} and its leader waits in a step",
            )


def _is_in_or_comes(member: "SimRank", binding: Binding) -> bool:
    """The rank is in the formation, or will hear that it is to join it."""
    participant = member.participant
    is_awaited = participant.target is not None and binding in participant.target.bindings
    return participant.binding == binding or (is_awaited and not participant.may_drain)


def _does_without(
    member: "SimRank", binding: Binding, incarnations: Mapping[Rank, int | None]
) -> bool:
    """It does not come any more, as it has heard that a process of the group is cut out or dead."""
    wanted = member.participant.wanted
    present = dict(wanted.members) if wanted is not None else {}
    is_whole = all(present.get(rank) == incarnations[rank] for rank in binding.group.ranks)
    return not (_is_in_or_comes(member, binding) or is_whole)


def _had_no_room(member: "SimRank", step: Step) -> bool:
    return member.room.lacked_since(step.formation) is not None


def _stays_away(member: "SimRank", step: Step) -> bool:
    """It never came, as another member is cut out or dead; who is in the step is told of that."""
    return member.rank not in step.arrived and not _is_in_or_comes(member, step.binding)
