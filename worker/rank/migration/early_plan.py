"""What one rank copies while all groups serve, from the manifests that they publish. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.protocol.terms import Target
from kvadaptor.geometry import PageGeometry
from kvadaptor.reshard.early import EarlyPlan, plan_early
from kvadaptor.reshard.terms import Ints
from worker.rank.migration.early_copy import EarlyCopy
from worker.rank.migration.manifest import Component, Manifest, TaskSnapshot, component_of


@dataclass(frozen=True, slots=True, eq=False)
class EarlyShare:
    """What one rank does in a round.

    `held` is what it holds once all of `copies` are done, by task; its `slots` are then numbers of
    the plan's blocks. `led` are tasks that it may lead, with their old leaders.
    """

    copies: EarlyPlan
    held: Mapping[str, EarlyCopy]
    led: tuple[tuple[int, TaskSnapshot], ...]


def plan_early_copies(
    rank: int,
    manifests: Mapping[int, Manifest],
    target: Target,
    geometry: PageGeometry,
    spare: Ints,
) -> EarlyShare | None:
    """Plan what `rank` can copy into its `spare` pages while all groups serve; None: nothing.

    Raises `ReshardError`.
    """
    found = component_of(rank, manifests, target, geometry, is_serving=True)
    given = found.given
    if given is None or not any(rank in each.group.ranks for each in found.bindings):
        return None
    plan = plan_early(given, rank, spare)
    copies: dict[str, EarlyCopy] = {}
    for task, (places, numbers) in plan.places.items():
        leader, cargo = found.cargo[task]
        state = cargo.state
        copies[task] = EarlyCopy(
            task,
            leader,
            cargo.attempt,
            state.preemptions,
            plan.width,
            places,
            state.blocks[places],
            numbers,
        )
    is_leader = any(each.group.leader == rank for each in found.bindings)
    return EarlyShare(plan, copies, _led(plan, found, manifests) if is_leader else ())


def _led(
    plan: EarlyPlan, found: Component, manifests: Mapping[int, Manifest]
) -> tuple[tuple[int, TaskSnapshot], ...]:
    """Return the tasks of the rank's new group, and those that no group has yet.

    These lack a full block, so any leader may get them.
    """
    short = tuple(
        (leader, cargo)
        for leader in (group[0] for group in found.groups)
        for cargo in manifests[leader].cargo
        if cargo.state.task not in found.cargo
    )
    return (*(found.cargo[task] for task in plan.chains), *short)
