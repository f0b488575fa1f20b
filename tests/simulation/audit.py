"""The auditor: which invariant is checked where, and the checks that need the whole world.

I1 every accepted request ends once     `checkers.Stream.finish`, `rest.check_rest`
I2 tokens without gap, repeat or change `checkers.Stream.deliver` behind the real `TokenStream`
I3 one group and epoch per rank         `StageChecker`, `check_one_leads`, `World.check_may_start`
I4 no mixed collective                  `check_agreement`, equal leases and KV in `Holdings.execute`
I5 the queue is bounded                 `QueueAudit`; the order of tiers: `test_task_queue.py`
I6 all comes to rest once faults heal   `rest.unrest_of`
and every move that is planned in the world is planned by the real planner too: `check_real_plan`.
"""

import random
from collections.abc import Mapping, Sequence

import numpy as np

from comm_pool.layout import Rank
from coordinator.core.core import Core
from coordinator.model.settings import QueueBounds
from coordinator.protocol.messages.gateway import Submit
from coordinator.protocol.terms import Target, Tier
from kvadaptor.reshard.plan import plan_reshard
from kvadaptor.reshard.terms import Chain, Ints, NewGroup, OldGroup, ReshardInput
from tests.harness.kv.reshard_model import check_plan
from tests.simulation.checkers import check
from tests.simulation.sim_engine import slots_of
from tests.simulation.sim_plan import Cargo, Manifest, Ranks, tasks_of, whole_groups

HEADS = 8
"""So many that every width divides them."""


class QueueAudit:
    """No submission makes the queue longer than its bounds."""

    def __init__(self, core: Core, bounds: QueueBounds, message: Submit) -> None:
        self._core, self._bounds, self._message = core, bounds, message
        self._was_known = message.header.task in core._pool.tasks
        self._before = self._counts()

    def check(self) -> None:
        message = self._message
        if self._was_known or message.attempt or message.delivered_tokens:
            # What a client has seen tokens of is never turned away.
            return
        limits = {tier: self._bounds.of(tier).tasks_max for tier in Tier}
        for tier, count in self._counts().items():
            bound = self._bounds.tasks_max if tier is None else limits[tier]
            before = self._before[tier]
            check(
                bound is None or count <= max(before, bound),
                f"{count} tasks of tier {tier} wait where {bound} may, before it were {before}",
            )

    def _counts(self) -> dict[Tier | None, int]:
        queue = self._core._pool.tasks.queue
        return {None: len(queue), **{tier: queue.count(tier) for tier in Tier}}


def check_real_plan(
    manifests: Mapping[Rank, Manifest], target: Target, num_pages: Mapping[Rank, int]
) -> int:
    """Plan the move with the product's planner and check its every promise; return tasks planned.

    What ranks really told at this point of the protocol is the input: groups, blocks, free pages.
    """
    left = whole_groups(manifests)
    tasks = tasks_of(manifests, left)
    news = [each.group.ranks for each in target.bindings]
    news = [ranks for ranks in news if set(ranks) <= manifests.keys()]
    planned = 0
    for component in _components([*left, *news], manifests):
        olds = [group for group in left if set(group) <= set(component)]
        covered = {rank for ranks in olds for rank in ranks}
        news_here = [ranks for ranks in news if set(ranks) <= set(component)]
        led = {rank for ranks in news_here for rank in ranks}
        if set(component) != led:
            # Ranks of a group that is not whole here go on without a plan.
            continue
        old = [_old_group(group, manifests, tasks) for group in olds]
        old += [OldGroup((rank,)) for rank in component if rank not in covered]
        given = ReshardInput(
            num_kv_heads=HEADS,
            num_pages={rank: num_pages[rank] for rank in component},
            old=tuple(sorted(old, key=lambda group: group.ranks)),
            new=tuple(NewGroup(ranks) for ranks in news_here),
            free={rank: _free(manifests[rank], old) for rank in component},
        )
        plan = plan_reshard(given)
        check_plan(given, plan, random.Random(0))
        planned += len(plan.carried)
    return planned


def _components(groups: list[Ranks], manifests: Mapping[Rank, Manifest]) -> list[Ranks]:
    """Spans of ranks that share groups; aligned groups nest, so the widest of each counts."""
    widest = {
        max((group for group in groups if rank in group), key=len, default=(rank,))
        for rank in manifests
    }
    return sorted(widest)


def _old_group(
    group: Ranks, manifests: Mapping[Rank, Manifest], tasks: Sequence[tuple[Cargo, Ranks]]
) -> OldGroup:
    width, per_page = len(group), slots_of(len(group))
    chains = []
    for cargo, source in tasks:
        pages = [manifests[rank].pages for rank in group]
        wanted = {block // per_page for block in cargo.blocks}
        # A member that has given up its lease has no slots to tell of.
        if source != group or not all(wanted <= each.keys() for each in pages):
            continue
        rows = [
            [each[b // per_page] * width + b % per_page for b in cargo.blocks] for each in pages
        ]
        slots = np.array(rows, dtype=np.int64).reshape(width, len(cargo.blocks))
        chains.append(Chain(cargo.header.task, slots, tier=int(cargo.header.tier)))
    return OldGroup(group, tuple(chains))


def _free(manifest: Manifest, old: list[OldGroup]) -> Ints:
    pages = set(manifest.free)
    for group in old:
        if manifest.rank in group.ranks and manifest.ranks == group.ranks:
            place, width = group.ranks.index(manifest.rank), len(group.ranks)
            held = {int(slot) // width for chain in group.chains for slot in chain.slots[place]}
            pages |= set(manifest.pages.values())
            pages -= held
    return np.array(sorted(pages), dtype=np.int64)
