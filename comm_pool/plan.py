"""The communicator plan: every group that may ever be bound, in one global order.

Invariant: the plan depends on the number of ranks and the supported widths alone, so each rank
computes the same one. Creating communicators is collective, so another order on one rank would hang
the cell. Only aligned, contiguous groups are planned, so their number grows linearly: W-1 for W
ranks and all powers of two (Flying Serving, section 4.3). Each rank calls it at start-up, and the
coordinator calls it to know what it may bind.
"""

from collections.abc import Collection

from comm_pool.layout import Rank

CommunicatorPlan = tuple[tuple[Rank, ...], ...]
"""Member ranks of each communicator, in the order of creation."""


class PlanError(ValueError):
    """Widths that this cell cannot support; the message is one sentence."""


def communicator_plan(world: int, widths: Collection[int]) -> CommunicatorPlan:
    """Return all aligned groups of width 2 and more, by width, then by first rank.

    `world` is the number of ranks of the cell. Width 1 needs no communicator. Raises `PlanError`
    as `normalise_widths` does.
    """
    return tuple(
        tuple(Rank(rank) for rank in range(first, first + width))
        for width in normalise_widths(world, widths)
        if width > 1
        for first in range(0, world, width)
    )


def normalise_widths(world: int, widths: Collection[int]) -> tuple[int, ...]:
    """Return the supported widths, ascending and distinct; 1 is always among them.

    Every width is a power of two that divides `world`, because the groups of one width must
    together hold every rank; otherwise `PlanError`.
    """
    if world < 1:
        raise PlanError(f"a cell has at least one rank, not {world}.")
    for width in sorted(widths):
        if width < 1 or width & (width - 1):
            raise PlanError(f"width {width} is not a power of two.")
        if width > world:
            raise PlanError(f"width {width} is more than the {world} ranks of the cell.")
        if world % width:
            raise PlanError(
                f"width {width} does not divide the {world} ranks of the cell, so some would "
                f"be left over."
            )
    return tuple(sorted({1, *widths}))


def by_width(plan: CommunicatorPlan) -> dict[int, list[list[int]]]:
    """Return width -> all groups of that width, both in the order of the plan.

    Each value is what vLLM's `init_model_parallel_group` takes as `group_ranks`: one call per
    width, made by all ranks in this order, with every rank in exactly one of the lists.
    """
    grouped: dict[int, list[list[int]]] = {}
    for ranks in plan:
        grouped.setdefault(len(ranks), []).append([int(rank) for rank in ranks])
    return grouped
