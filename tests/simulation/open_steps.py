"""The steps that are open in the world, who may begin one, and who may leave one."""

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from comm_pool.layout import Rank
from coordinator.protocol.terms import Binding
from tests.harness.worker.fake_scheduler import FakePlan
from tests.simulation.checkers import (
    Violation,
    check,
    check_agreement,
    check_one_leads,
)
from tests.simulation.lenders import check_loans
from tests.simulation.sim_scheduler import SimPlan

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank
    from tests.simulation.world import World


class OpenStep:
    """One collective of a formation: complete when all members are in it.

    In a step of a pipeline group, the members of each stage meet, and compute once the stage before
    has. They wait for no later stage. The members of the last stage are the first ranks.
    """

    def __init__(
        self,
        world: "World",
        binding: Binding,
        plan: SimPlan,
        incarnations: Mapping[Rank, int | None],
        stages: int = 1,
    ) -> None:
        """Members of a group that meet before its first step do so in a single stage."""
        self._world = world
        self._stages = stages
        self._began_at = world.now
        self._ends_at: list[int] = []
        """When each stage that has computed is over, from the first one on."""
        self.binding = binding
        self.plan = plan
        self.incarnations = incarnations
        """The processes of the formation, as its leader knows them."""
        self.tokens: dict[str, int] = {}
        """What the step gives its tasks."""
        self.is_void = False
        """Whether a member has come out of it: it is never complete."""
        self.arrived: set[Rank] = set()
        self.begun_by: set[Rank] = set()
        """Members that have it, and run it now or later."""
        self._computes: dict[Rank, Callable[[], Any]] = {}

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return self.binding.group.ranks

    @property
    def formation(self) -> int:
        return self.binding.formation

    @property
    def is_complete(self) -> bool:
        """Whether all members have computed it."""
        return self._is_over_in(self._stages - 1)

    def _is_over_in(self, stage: int) -> bool:
        """Whether a stage has computed it, and all before that."""
        return stage < len(self._ends_at) and self._world.now >= self._ends_at[stage]

    def _stage_of(self, rank: Rank) -> int:
        return self._stages - 1 - self.ranks.index(rank) * self._stages // len(self.ranks)

    def has_passed(self, rank: Rank) -> bool:
        """Whether a member that is in it need not wait any more; computes if its turn has come."""
        stage = self._stage_of(rank)
        self._advance(stage)
        return self._is_over_in(stage)

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.is_void

    def arrive(self, rank: Rank, compute: Callable[[], Any] = dict) -> None:
        """A member is in it now; it computes its share when all are, even if it ends then."""
        self.arrived.add(rank)
        self._computes[rank] = compute
        self._advance(self._stage_of(rank))

    def _advance(self, stage: int) -> None:
        """Let the members of a stage compute if all are there, and the stage before has."""
        if stage != len(self._ends_at) or (stage and not self._is_over_in(stage - 1)):
            return
        if self.is_void and self._stages == 1:
            return
        mates = [rank for rank in self.ranks if self._stage_of(rank) == stage]
        if self.arrived.issuperset(mates):
            # Each stage takes as long as a step of another group.
            began_at = self._world.now if stage else self._began_at
            self._ends_at.append(began_at + self._world.step_ticks)
            for rank in mates if self._stages > 1 else list(self._computes):
                self._computes[rank]()

    def leave(self, rank: Rank) -> None:
        """A member has come out of it: it counts for nobody."""
        self.arrived.discard(rank)
        self._computes.pop(rank, None)
        self.is_void |= self._stage_of(rank) >= len(self._ends_at)


class OpenSteps:
    """Steps that are not complete."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._open: list[OpenStep] = []
        self._meetings: dict[tuple[Binding, int], OpenStep] = {}
        self._met: dict[tuple[Rank, int], int] = {}
        self._numbers = itertools.count()

    def begin(self, process: "SimRank", plan: FakePlan) -> OpenStep:
        """A member begins, or defers, a step that its leader has planned."""
        assert isinstance(plan, SimPlan)
        own = process.participant.binding
        assert plan.binding is not None
        check_agreement(plan.binding, own, process.rank)
        if plan.table != (own_table := process.engine.table_of()):
            raise Violation(f"lease indices in {own}: {sorted(own_table)}, {sorted(plan.table)}")
        if plan.step is None:
            plan.step = OpenStep(
                *(self._world, plan.binding, plan, process.participant.members),
                plan.binding.group.stages,
            )
            draw = self._world.rng.getrandbits(30)
            names = [part.name for part in plan.parts if part.gives]
            plan.step.tokens = {name: draw + number for number, name in enumerate(names)}
            if process.rank == plan.step.ranks[0]:
                self._check_may_begin(process, plan.step)
            else:
                self._check_has_no_room(plan.step)
            if plan.binding.group.stages > 1:
                self._count(plan.step)
            if len(plan.step.ranks) > 1:
                self._open = [each for each in self._open if not each.is_over]
                self._open.append(plan.step)
        plan.step.begun_by.add(process.rank)
        return plan.step

    def _count(self, step: OpenStep) -> None:
        """Count a step of a pipeline group that begins."""
        others = (each for each in self._open if each.binding == step.binding)
        self._world.stats.staged += 1
        self._world.stats.ahead += any(not each.is_over for each in others)

    def meeting(self, process: "SimRank", ranks: tuple[Rank, ...], formation: int) -> OpenStep:
        """The members of a group wait for each other, before its first step."""
        binding = process.participant.binding
        assert binding is not None and (binding.group.ranks, binding.formation) == (
            ranks,
            formation,
        )
        count = self._met.get((process.rank, formation), 0)
        self._met[process.rank, formation] = count + 1
        key = binding, count
        if key not in self._meetings:
            plan = SimPlan((), frozenset(), 0)
            self._meetings[key] = OpenStep(self._world, binding, plan, process.participant.members)
        self._world.stats.meetings += 1
        return self._meetings[key]

    # ------------------------------------------------------------------ who may begin one

    def _check_may_begin(self, leader: "SimRank", step: OpenStep) -> None:
        """A leader begins a step: all members must be in the formation, and it must be wanted.

        Or about to join it: what waits for the outcome of a move into it does.
        """
        world, ranks = self._world, step.ranks
        world.stats.steps += 1
        world.stats.reunited += leader.cohort > 0 and len(ranks) > 1
        check_loans(world, leader, step.binding.group)
        for rank in ranks:
            process = world.ranks[rank]
            if process is None or process.incarnation != step.incarnations[rank]:
                continue
            if _does_without(process, step) or step.formation in process.had_no_room_in:
                # The leader is about to hear that the group is none any more.
                continue
            communicators = process.engine.communicators
            # It may have closed it in this formation: a leader that stood still has not heard yet.
            is_lost = communicators.is_aborted(ranks, step.formation)
            is_closed = ranks in communicators.closed and not is_lost
            check(not is_closed, f"rank {rank} is in a group that it has closed")
            has_joined = (rank, process.incarnation) in world.memory.joined
            world.stats.rejoined += has_joined and len(ranks) > 1
            if not _is_in_or_comes(process, step.binding):
                where = process.participant.binding
                raise Violation(f"rank {leader.rank} steps in {step.binding}, {rank} is in {where}")
        names = {part.name for part in step.plan.parts}
        for other in world.alive:
            if other is not leader and any(led.header.task in names for led in other.runtime.book):
                check_one_leads(step.plan, leader, other, world.gateways)
        core = world.core
        # A probe continues no task, so it needs no time lease. A process that stands still after it
        # has looked at its lease cannot know; then, too, its tokens are fenced off.
        had_lease = step.plan.parts and leader.leads_since == world.now
        if had_lease and core is not None and not core.views.is_recovering:
            # Who computes wrongly is left out while its lease lasts.
            check(
                core.views.is_available(leader.rank) or core._roster.guard.is_wrong(leader.rank),
                f"rank {leader.rank} starts a step although it is cut out",
            )

    def _check_has_no_room(self, step: OpenStep) -> None:
        """A leader sends a step and does not begin it: that fails, as it had no room for it."""
        leader = self._world.ranks[step.ranks[0]]
        is_there = leader is not None and leader.incarnation == step.incarnations[step.ranks[0]]
        check(
            not is_there or (leader and step.formation in leader.had_no_room_in),
            f"{step.binding} begins a step without its leader",
        )
        step.is_void = True

    def check_nobody_waits_for(self, follower: "SimRank", binding: Binding) -> None:
        """A follower leaves: its leader must not wait for it in a step that does not fail.

        A follower that had no room tells of it until the others come out; if they never do, the
        cell comes to no rest.
        """
        for step in self._open:
            check(
                step.binding != binding
                or step.is_complete
                or follower.rank in step.begun_by
                or self._is_void(step),
                f"rank {follower.rank} left {binding} and its leader waits in a step",
            )

    def _is_void(self, step: OpenStep) -> bool:
        """Whether the members come out of the step without its results."""
        if step.is_void:
            return True
        for rank in step.ranks:
            member = self._world.ranks[rank]
            if member is None or member.incarnation != step.incarnations[rank]:
                return True
            is_aborted = member.engine.communicators.is_aborted(step.ranks, step.formation)
            if is_aborted or step.formation in member.had_no_room_in or _does_without(member, step):
                return True
        return False


def _is_in_or_comes(member: "SimRank", binding: Binding) -> bool:
    """The rank is in the formation, or will hear that it is to join it."""
    participant = member.participant
    is_awaited = participant.target is not None and binding in participant.target.bindings
    return participant.binding == binding or (is_awaited and not participant.may_drain)


def _does_without(member: "SimRank", step: OpenStep) -> bool:
    """It does not come any more, as it has heard that a process of the group is cut out or dead."""
    wanted = member.participant.wanted
    present: dict[Rank, Any] = dict(wanted.members) if wanted is not None else {}
    is_whole = all(present.get(rank) == step.incarnations[rank] for rank in step.ranks)
    is_left = step.formation in member.left_as_lost
    return not _is_in_or_comes(member, step.binding) and (is_left or not is_whole)
