"""Why a wanted switch is impossible: one sentence for an operator, or None.

The core checks before it changes anything, for the admin API and for the policy.
"""

import itertools
from collections.abc import Collection

from comm_pool.layout import Group, Layout, Mode, Rank
from comm_pool.mixed import Staged
from coordinator.ranks.roster import Roster


def why_unreachable(layout: Layout, roster: Roster, alive: Collection[Rank]) -> str | None:
    """Return the reason why `layout` cannot be reached, or None."""
    wide = [group for group in layout.groups if group.width > 1]
    # Lazily and in order, as the roster may know nothing of an unavailable rank.
    reasons = itertools.chain(
        [_refuse_narrow(layout, roster), _refuse_ranks(layout, roster, alive)],
        (_refuse_lacking(group, roster) for group in layout.groups),
        (_refuse_group(group, roster) for group in wide),
        (_refuse_drifted(group, roster) for group in wide),
    )
    return next((reason for reason in reasons if reason is not None), None)


def _refuse_narrow(layout: Layout, roster: Roster) -> str | None:
    need = roster.narrowest
    if need == 1 or roster.serves_whole(layout):
        return None
    return (
        f"each rank holds only one of several parts of the weights, so groups are {need} wide: "
        f"use 'tp{need}', or another mode of {need} ranks, or start the cell with --borrow ffn."
    )


def _refuse_lacking(group: Group, roster: Roster) -> str | None:
    part = roster.lacking(group)
    if part is None:
        return None
    holders = roster.parts.holders(part, group.leader)
    names = " or ".join(map(str, holders))
    return (
        f"{group.name} of rank {group.leader} lacks part {part} of the weights, and the memory of "
        f"rank {names}, which holds it, cannot be read: wait until that rank is back."
    )


def _refuse_ranks(layout: Layout, roster: Roster, alive: Collection[Rank]) -> str | None:
    for rank in layout.ranks:
        if rank >= roster.world:
            return f"rank {rank} does not exist: use ranks 0 to {roster.world - 1}."
        if rank not in alive:
            return f"rank {rank} is not available; write 'off1' in its place."
    unused = [rank for rank in alive if rank not in layout.ranks]
    if unused:
        return (
            f"rank {unused[0]} is available but not in the layout: add it, as every available rank "
            f"must serve."
        )
    return None


def _refuse_group(group: Group, roster: Roster) -> str | None:
    if not roster.is_one_cohort(group.ranks):
        newest = max(group.ranks, key=lambda rank: roster[rank].hello.cohort)
        return (
            f"rank {newest} was restarted without all others of {group.name}, so they have no "
            f"communicators: keep them in dp, or run `aileron renew`, which restarts all ranks."
        )
    if (rank := roster.closed_by(group.ranks)) is not None:
        return (
            f"rank {rank} aborted {group.name} of ranks {group.ranks[0]} to {group.ranks[-1]} "
            f"after a member was lost: use other groups, or run `aileron renew`, which restarts "
            f"all ranks."
        )
    for rank in group.ranks:
        if not roster.supports(rank, group.width):
            return f"rank {rank} does not support groups {group.width} wide: use another width."
        if group.mode is Mode.PP:
            staged = Staged(group.stages, group.tp)
            if not roster.can_compute(rank, group.width, staged):
                return (
                    f"rank {rank} has not prepared {staged}: start the cell with --pipelines "
                    f"{staged}, or use 'tp{group.width}'."
                )
        if group.mode not in (Mode.SP, Mode.SHIFT):
            continue
        if not roster.can_compute(rank, group.width, group.mixed or Mode.SP):
            return _no_sp(rank, group, roster)
    return None


def _no_sp(rank: Rank, group: Group, roster: Roster) -> str:
    if group.mixed is None and roster.narrowest > 1:
        return (
            f"{group.name} needs all of the weights on each rank, which holds only one of several "
            f"parts of the weights: use 'tp{group.width}' or a mixed mode, or start the cell with "
            "--borrow ffn."
        )
    if group.mixed is None:
        return (
            f"rank {rank} cannot compute this model in sp {group.width} wide: "
            f"use 'tp{group.width}'."
        )
    return (
        f"rank {rank} has not prepared {group.mixed} for this model: start the cell with "
        f"--mixed {group.mixed}, or use 'tp{group.width}'."
    )


def _refuse_drifted(group: Group, roster: Roster) -> str | None:
    probed = roster.guard.why_not(group)
    if probed is None:
        return None
    return (
        f"{probed.mode} of ranks {group.ranks[0]} to {group.ranks[-1]} is out of service, because "
        f"its probe was off by {probed.error_nats:.3g} nats: restart its ranks, or run "
        f"`aileron put-back {probed.mode}`."
    )
