"""Plans a rank's share of a migration, if possible before the coordinator asks for it.

The mailboxes hold all that a plan needs as soon as the last rank has left its group. The
coordinator's round trip takes as long as planning does, so both overlap. Used by the rank's main
loop, but for `draft`.
"""

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.terms import Carry, Phase, Target
from kvadaptor.reshard.terms import ReshardError
from kvadaptor.transfer.mailbox import RankMailbox
from worker.rank.engine import Engine
from worker.rank.migration.draft_plan import DraftPlan
from worker.rank.migration.empty_blocks import without_empty_blocks
from worker.rank.migration.manifest import Manifest, MigrationPlan, plan_move
from worker.rank.migration.manifest_changes import ManifestChanges

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _PlannedAhead:
    epoch: int
    target: Target
    ranks: frozenset[Rank]
    """The ranks whose manifests it was planned from."""
    move: MigrationPlan | None
    """None if planning failed."""


class MigrationPlanner:
    """Plans the next migration."""

    def __init__(self, engine: Engine, mailboxes: Mapping[Rank, RankMailbox], rank: Rank) -> None:
        self._engine = engine
        self._mailboxes = mailboxes
        self._rank = rank
        self._ahead: _PlannedAhead | None = None
        self._draft: DraftPlan | None = None
        self._read_round: tuple[int, int] = (0, 0)
        """The epoch and the round of early copies whose manifests this rank has all read."""
        self._manifests: Mapping[int, Manifest] = {}
        """Those, by rank."""

    def remember(self, epoch: int, number: int, manifests: Mapping[int, Manifest]) -> None:
        """Know what all ranks have published in a round of an epoch until its switch is over."""
        self._read_round, self._manifests = (epoch, number), manifests

    def draft(
        self, epoch: int, number: int, manifests: Mapping[int, Manifest], target: Target
    ) -> DraftPlan:
        """Return a plan of an epoch from the manifests of a round, in which groups serve.

        Any thread may call it. Raises as `plan`.
        """
        move = plan_move(self._rank, manifests, target, self._engine.kv.geometry)
        return DraftPlan(self._rank, epoch, number, target, manifests, move)

    def keep(self, draft: DraftPlan) -> None:
        """Plan the migration of its epoch by this draft, if that still holds by then."""
        self._draft = draft

    def draft_of(self, epoch: int) -> int:
        """Return the round in which the plan for this epoch was drafted; 0: it was not."""
        draft = self._draft
        return draft.round if draft is not None and draft.epoch == epoch else 0

    def forget_draft(self) -> None:
        """Plan the next migration without the draft."""
        self._draft = None

    def forget_manifests(self) -> None:
        """Forget the manifests of the draft, too: its switch is over."""
        self.forget_draft()
        self._read_round, self._manifests = (0, 0), {}

    def manifest_in(self, epoch: int, number: int) -> Manifest | None:
        """Return what this rank published in a round of early copies, if it has read all of it."""
        is_known = number > 0 and self._read_round == (epoch, number)
        return self._manifests.get(self._rank) if is_known else None

    def plan_ahead(self, wanted: Directive | None) -> bool:
        """Plan the expected migration once all ranks of its target have published their manifests.

        Returns whether some have not published yet.
        """
        if wanted is None or (wanted.stage.phase, wanted.carry) != (Phase.PARK, Carry.RESHARD):
            return False
        epoch, target = wanted.stage.epoch, wanted.target
        if self._ahead is not None and self._ahead.epoch == epoch:
            return False
        present = self.peers(wanted, changing_ranks(target, epoch))
        if any(self._mailboxes[rank].epoch != epoch for rank in present):
            return True
        move = None
        try:
            move = self._plan(present, target)
        except Exception:
            # The migration itself will fail likewise and report it.
            log.warning("move_not_planned_ahead", epoch=epoch, exc_info=True)
        self._ahead = _PlannedAhead(epoch, target, present, move)
        return False

    def plan(self, directive: Directive) -> MigrationPlan:
        """Plan the migration of all movers that are peers; their mailboxes must be of its epoch.

        Raises `ReshardError`, also if a peer has published changes and this rank lacks the rest.
        """
        present = self.peers(directive, directive.movers)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.move is not None:
            known = ahead.epoch, ahead.target, ahead.ranks
            if known == (directive.stage.epoch, directive.target, present):
                return ahead.move
        return self._plan(present, directive.target)

    def peers(self, directive: Directive, ranks: Iterable[Rank]) -> frozenset[Rank]:
        """Return the ranks whose mailboxes can be read; the others share no group with this one.

        In shared memory a restarted rank takes over its predecessor's mailbox. Elsewhere a
        restarted process has a mailbox of its own, and no process writes to the one mapped here.
        """
        known = (rank for rank in ranks if rank in self._mailboxes)
        spec = self._engine.spec
        if spec.memory is not None:
            return frozenset(known)
        now = dict(directive.members)
        return frozenset(rank for rank in known if now.get(rank) == spec.together.get(rank))

    def _plan(self, ranks: Iterable[Rank], target: Target) -> MigrationPlan:
        manifests: dict[int, Manifest] = {rank: self._read(rank) for rank in ranks}
        draft, geometry, move = self._draft, self._engine.kv.geometry, None
        if draft is not None and draft.target == target:
            move = draft.finished(manifests)
        if move is None:
            move = plan_move(self._rank, manifests, target, geometry)
        return without_empty_blocks(move, manifests, geometry.tokens_per_slot)

    def _read(self, rank: Rank) -> Manifest:
        mailbox = self._mailboxes[rank]
        found: Manifest | ManifestChanges = pickle.loads(mailbox.message)  # noqa: S301 -- our own ranks' memory
        if not isinstance(found, ManifestChanges):
            return found
        before = self._manifests.get(rank)
        if before is None or self._read_round != (mailbox.epoch, found.draft):
            raise ReshardError(f"rank {rank} has published changes of what this rank has not read.")
        return found.whole(before)


def changing_ranks(target: Target, epoch: int) -> list[Rank]:
    """Return the ranks that join another group at the switch of this epoch; the others serve on."""
    changing = (each.group.ranks for each in target.bindings if each.formation == epoch)
    return [rank for ranks in changing for rank in ranks]


def log_shortage(epoch: int, rank: Rank, move: MigrationPlan) -> None:
    """Log, once per component (its lowest rank), how the migration coped with scarce pages."""
    plan = move.plan
    if rank != move.ranks[0] or (plan.rounds <= 1 and not plan.fallbacks):
        return
    fallback_ids = {each.id for each in plan.fallbacks}
    tiers = Counter(
        (name in fallback_ids, cargo.header.tier.name.lower())
        for name, (_, cargo) in move.cargo.items()
    )
    log.info(
        "move_short_of_pages",
        epoch=epoch,
        rounds=plan.rounds,
        carried={tier: count for (is_fallback, tier), count in tiers.items() if not is_fallback},
        left={tier: count for (is_fallback, tier), count in tiers.items() if is_fallback},
        causes=dict(Counter(each.cause.value for each in plan.fallbacks)),
    )
