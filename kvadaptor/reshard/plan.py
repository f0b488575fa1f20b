"""Plans a live KV re-shard: which unit of which rank goes where, in which round.

Pure and deterministic, so every rank computes the same plan from the same input. The words and
shapes are in `terms`. Invariant of a plan: within a round no unit is written that this or a later
round reads or that is kept. Called by the worker between PARK and SERVE. Sources: Flying Serving,
section 4.2 (KV cache adaptor); Seesaw (re-sharding KV between parallelisms instead of recomputing
it).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvadaptor.reshard.assign import Share, recency, share_out, urgency
from kvadaptor.reshard.blocks import Blocks, joined, pieces, read_blocks
from kvadaptor.reshard.order import Bools
from kvadaptor.reshard.schedule import Need, Outcome, Placed, place
from kvadaptor.reshard.terms import (
    Carried,
    Fallback,
    FallbackCause,
    GroupLease,
    Ints,
    ReshardInput,
    ReshardPlan,
)

TRIALS_MAX = 10
"""Maximum placements tried to find the tasks that fit into the rounds; the rest falls back."""

CACHED_TRIALS_MAX = 4
"""Placements tried to find how many cached chains fit, to a 16th of them."""


def plan_reshard(given: ReshardInput) -> ReshardPlan:
    """Plan the switch of one component.

    Linear in blocks and pages: a few milliseconds for 10,000 blocks if there is room. If rounds run
    out, it tries several placements. The most urgent tasks are placed first; within a tier larger
    ones fall back first. If every member of each new group has free pages for all blocks that the
    group could get, there are no fallbacks, no dropped chains and only one round. Raises
    `ReshardError` for an invalid input.
    """
    blocks = read_blocks(given)
    search = _Search(given, blocks)
    best = search.run()
    return _plan(blocks, best, search.late)


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    share: Share
    needs: tuple[Need, ...]
    outcome: Outcome


class _Search:
    """Finds the chains that fit; `late` are the tasks excluded because rounds ran out."""

    def __init__(self, given: ReshardInput, blocks: Blocks) -> None:
        self._given = given
        self._blocks = blocks
        self._tasks = urgency(blocks)
        self._cached = recency(blocks)
        self.late: frozenset[int] = frozenset()

    def run(self) -> _Trial:
        """Return the best trial: as many tasks as possible, then as many cached chains."""
        most = self._given.rounds_max
        cheap = min(self._given.cached_rounds_max, most)
        if self._cached:
            # The usual case, which fails fast: everything, if it takes few rounds.
            whole = self._try(frozenset(), self._cached, cheap)
            if whole is not None:
                return whole
        bare = self._try(frozenset(), (), most) or self._leave_out()
        if not self._cached:
            return bare
        return self._add_cached(bare, max(cheap, bare.outcome.rounds))

    def _try(self, late: frozenset[int], cached: Sequence[int], limit: int) -> _Trial | None:
        """Place all tasks except `late`; None if that takes more rounds than the limit."""
        given, blocks = self._given, self._blocks
        tasks = [task for task in self._tasks if task not in late]
        share = share_out(given, blocks, tasks, cached)
        needs = _needs(given, blocks, share)
        outcome = place(blocks, needs, limit)
        return None if outcome is None else _Trial(share, needs, outcome)

    def _leave_out(self) -> _Trial:
        """Find what fits, in order of urgency, skipping tasks that do not fit."""
        limit = self._given.rounds_max
        fitting: list[int] = []
        rest = list(self._tasks)
        best = self._try(frozenset(self._tasks), (), limit)
        assert best is not None, "placing nothing takes no rounds."
        trials, high = 0, len(rest)
        while rest and trials < TRIALS_MAX:
            # rest[:low] fits and rest[:high] does not; len(rest) + 1 means unknown.
            low = 0
            while high - low > 1 and trials < TRIALS_MAX:
                middle = len(rest) if high > len(rest) else (low + high) // 2
                late = frozenset(self._tasks).difference(fitting, rest[:middle])
                trial = self._try(late, (), limit)
                trials += 1
                if trial is None:
                    high = middle
                else:
                    low, best, self.late = middle, trial, late
            fitting += rest[:low]
            rest = rest[low + 1 :]
            high = len(rest) + 1
        self.late = frozenset(self._tasks).difference(fitting)
        return best

    def _add_cached(self, bare: _Trial, limit: int) -> _Trial:
        """Find how many of the most recently used chains fit too."""
        low, high, best = 0, len(self._cached) + 1, bare
        for _ in range(CACHED_TRIALS_MAX):
            middle = (low + high) // 2
            if middle == low:
                break
            trial = self._try(self.late, self._cached[:middle], limit)
            if trial is None:
                high = middle
            else:
                low, best = middle, trial
        return best


def _needs(given: ReshardInput, blocks: Blocks, share: Share) -> tuple[Need, ...]:
    wanted = np.zeros((len(given.new), blocks.source.shape[1]), dtype=np.bool_)
    for number, row in enumerate(wanted):
        mine = (chain for chain, group in share.group_of.items() if group == number)
        row[joined(blocks.numbers[chain][: share.sizes[chain]] for chain in mine)] = True
    needs = []
    for group, order, row in zip(given.new, blocks.orders, wanted, strict=True):
        numbers = np.flatnonzero(row)
        # Alternate between old groups: no rank then waits for another to vacate its pages first.
        first = np.searchsorted(numbers, blocks.starts)
        old = np.searchsorted(blocks.starts, numbers, side="right") - 1
        needs.append(Need(group.ranks, order, numbers, np.arange(numbers.size) - first[old]))
    return tuple(needs)


def _plan(blocks: Blocks, best: _Trial, late: Collection[int]) -> ReshardPlan:
    share, outcome = best.share, best.outcome
    causes = dict.fromkeys(late, FallbackCause.ROUNDS) | share.refused
    leases = []
    # (groups, N): the logical block of each block in a group, and whether a unit of it moves.
    logical = np.zeros((len(best.needs), blocks.source.shape[1]), dtype=np.int64)
    moved = np.zeros(logical.shape, dtype=np.bool_)
    for row, (need, placed) in enumerate(zip(best.needs, outcome.placed, strict=True)):
        lease, block_of = _lease(need, placed, blocks.num_pages)
        leases.append(lease)
        logical[row, need.blocks] = block_of
        moved[row, need.blocks] = placed.moved
    dropped = [number for number in recency(blocks) if number not in share.group_of]
    return ReshardPlan(
        finest=blocks.finest,
        rounds=outcome.rounds,
        groups=tuple(leases),
        carried=_carried(blocks, share, logical, moved),
        copies=outcome.copies,
        fallbacks=tuple(
            Fallback(chain.id, causes[number])
            for number, chain in enumerate(blocks.chains)
            if number in causes
        ),
        dropped=tuple(blocks.chains[number].id for number in reversed(dropped)),
        in_place_units=outcome.in_place_units,
    )


def _carried(blocks: Blocks, share: Share, logical: Ints, moved: Bools) -> tuple[Carried, ...]:
    chains = sorted(share.group_of)
    prefixes = [blocks.numbers[chain][: share.sizes[chain]] for chain in chains]
    sizes = [each.size for each in prefixes]
    of_chains = np.array([share.group_of[chain] for chain in chains], dtype=np.int64)
    numbers, groups = joined(prefixes), np.repeat(of_chains, sizes)
    moves = np.concatenate(([0], np.cumsum(moved[groups, numbers])))
    ends = np.cumsum([0, *sizes])
    in_place = (np.diff(moves[ends]) == 0).tolist()
    return tuple(
        Carried(each.id, each.cached, share.group_of[chain], blocks_now, each.size, stays)
        for chain, each, blocks_now, stays in zip(
            chains,
            (blocks.chains[chain] for chain in chains),
            pieces(logical[groups, numbers], sizes),
            in_place,
            strict=True,
        )
    )


def _lease(need: Need, placed: Placed, num_pages: int) -> tuple[GroupLease, Ints]:
    """Return a group's lease and the logical block of each of its blocks."""
    width, count = placed.pages.shape
    if width == 1:
        block_of = placed.slots[0]
        table = np.empty((1, 0), dtype=np.int64)
        return GroupLease(need.ranks, placed.pages, table, np.sort(block_of)), block_of
    block_of = np.arange(width, width + need.blocks.size)
    table = np.empty((width, width * (count + 1)), dtype=np.int64)
    table[:, :width] = np.arange(width)
    for row, pages, slots in zip(table, placed.pages, placed.slots, strict=True):
        row[block_of] = slots
        vacant = np.zeros((num_pages, width), dtype=np.bool_)
        vacant[pages] = True
        vacant.reshape(-1)[slots] = False
        row[width + slots.size :] = np.flatnonzero(vacant)
    return GroupLease(need.ranks, placed.pages, table, block_of), block_of
