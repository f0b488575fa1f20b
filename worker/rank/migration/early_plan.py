"""What one rank copies while all groups serve, from the manifests that they publish. Pure."""

from collections.abc import Mapping

from coordinator.protocol.terms import Target
from kvadaptor.geometry import PageGeometry
from kvadaptor.reshard.early import EarlyPlan, plan_early
from kvadaptor.reshard.terms import Ints
from worker.rank.migration.early_copy import EarlyCopy
from worker.rank.migration.manifest import Manifest, component_of


def plan_early_copies(
    rank: int,
    manifests: Mapping[int, Manifest],
    target: Target,
    geometry: PageGeometry,
    spare: Ints,
) -> tuple[EarlyPlan, Mapping[str, EarlyCopy]] | None:
    """Plan what `rank` can copy into its `spare` pages while all groups serve; None: nothing.

    Also returns what the rank holds, by task, once all is copied; its `slots` are then numbers of
    the plan's blocks. Raises `ReshardError`.
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
    return plan, copies
