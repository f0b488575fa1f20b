"""vLLM adapter: all module trees of a rank, built and proved at start-up.

The trees are the replica, a tp tree of views for each further width, and per width an sp tree and
one tree per mixed shape. Only the replica owns weights. A mixed tree is an sp tree over one part of
the weights instead of all of them: the part is one more tp tree, whose rank is its place in a
strided group (comm_pool/mixed.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config

from comm_pool.head_exchange import HeadExchange
from comm_pool.layout import Mode, StepMode
from comm_pool.mixed import Staged, shape_of_parts
from comm_pool.pool import Communicator, CommunicatorPool, activate
from kvadaptor.views import LAYOUT
from worker.engine.config import ModeKey, mode_config
from worker.engine.counters import LoanCounts
from worker.engine.device import room_for_whole, whole_blocks
from worker.engine.lasting_weights import LastingWeights
from worker.engine.sequence_parallel.exchange import prove_exchange
from worker.engine.sequence_parallel.tree import SequenceParallel, build_mixed_tree, build_sp_tree
from worker.engine.startup_cache import StartupMeasurements
from worker.engine.weights.borrowed import build_borrowing_tree
from worker.engine.weights.layers import ViewError
from worker.engine.weights.lending import Borrowing, Place, share_parts
from worker.engine.weights.model_proof import StepUnprovedError, can_prove, compare, logits_of
from worker.engine.weights.outcomes import Outcomes, outcomes_of, outcomes_of_model
from worker.engine.weights.part_finder import find_part
from worker.engine.weights.part_store import StoredPart, store_part
from worker.engine.weights.ring import LoanRing
from worker.engine.weights.rope import fuse_rope
from worker.engine.weights.selftest import prove_tree
from worker.engine.weights.silu import plug_silu
from worker.engine.weights.tree import (
    build_stage_tree,
    build_tp_tree,
    foreign_bytes,
    load_replica,
    loading_plan,
    weight_bytes,
)
from worker.engine.weights.whole_layers import AutoWhole
from worker.spec import RankSpec

log = structlog.get_logger()

Trees = dict[ModeKey, dict[StepMode, nn.Module]]
"""The trees that can compute a step, by width; vLLM's set-up sees the first of each."""


@dataclass(slots=True)
class TreeBuilder:
    """Builds a rank's trees, together with all other ranks unless it rehearses.

    `keys` are dp and tp of every further width, ascending; `configs` has vLLM's configuration of
    each, `spec` the mixed shapes to prepare. Weights are laid out in as many parts as the cell's
    widest group has ranks, whatever keys this rank has.
    """

    base: VllmConfig
    configs: dict[ModeKey, VllmConfig]
    keys: tuple[ModeKey, ...]
    spec: RankSpec
    communicators: CommunicatorPool
    device: torch.device
    replica_bytes: int = 0
    """Bytes of the weights, once loaded."""
    loaded_bytes: int = 0
    """Bytes of the weights that were read from the checkpoint; 0 if the cell's memory had them."""
    view_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of each tree outside of the replica; the rank refuses to start unless 0."""
    borrowing: Borrowing | None = None
    """What the rank computes alone with, once loaded; None if it has all weights or waits alone."""
    _proved: int = 0

    @property
    def lasting(self) -> LastingWeights | None:
        """Where the weights outlive a CUDA rank; None if they do not, or on CPU."""
        if self.spec.lasting is None:
            return None
        return LastingWeights(self.spec.lasting, self.spec.rank, self.device)

    @property
    def borrows(self) -> bool:
        """Whether the rank borrows the parts that it lacks."""
        return self.spec.parts > 1 and self.spec.borrow != "none"

    def loan_counts(self) -> LoanCounts | None:
        """Return the counts of what the rank borrows, once loaded; None if it borrows nothing."""
        if self.borrowing is None:
            return None
        # Ranks that share the tokens of a step compute logits as in tp.
        own = self.borrowing
        rings: dict[StepMode, tuple[LoanRing, ...]] = {
            Mode.DP: (own.ring, own.lm_head_ring),
            Mode.SP: (own.ring,),
        }
        return LoanCounts(rings, own.whole_layers, own.lenders, own.lent_bytes)

    def load(self) -> nn.Module:
        """Load the replica through vLLM's loader; raises `ViewError` for an unknown model.

        A rank that holds one part of the weights loads that part, which serves as its replica. A
        process that replaces a lost one finds in memory what that one has loaded.
        """
        parts = self.spec.parts
        config, group = self.configs[self.keys[0]], self.communicators.of_width(1)
        if parts > 1:
            config, group = self._config_of_part(parts), self._parted_over()
        activate(group)
        with set_current_vllm_config(config), whole_blocks(self.device):
            replica, stored = self._find(config) or (None, None)
            if replica is None:
                replica = load_replica(config, self.spec.widest, parts, self.spec.borrow)
                self.loaded_bytes = weight_bytes(replica)
                if not self.borrows:
                    self._store(config, replica)
            self._prove(replica, replica, parts, group.rank_in_group)
            if self.borrows:
                self.borrowing = self._share_parts(replica, stored)
        self.replica_bytes = weight_bytes(replica)
        return replica

    def _find(self, config: VllmConfig) -> tuple[nn.Module, StoredPart] | None:
        """Return what a process before this one has left in the cell's memory, if any."""
        spec, lasting = self.spec, self.lasting
        plan = loading_plan(config, spec.widest, spec.parts, spec.borrow)
        compute = partial(self._outcomes, config)
        try:
            if lasting is not None and lasting.are_there:
                memory = lasting.lasting.cell
                found = find_part(config, plan, memory, spec.rank, compute, lasting.map)
                if found is not None:
                    return found
            elif spec.joins and spec.memory is not None:
                return find_part(config, plan, spec.memory, spec.rank, compute)
            elif lasting is None:
                return None
        except Exception as error:  # noqa: BLE001 -- a rank that finds nothing loads
            log.warning("part_not_found", reason=str(error), instead="the checkpoint is read")
        if lasting is not None:
            # The device has no room for weights that nobody uses.
            lasting.drop()
        # A configuration has the layers of one tree.
        config.compilation_config.static_forward_context.clear()
        config.compilation_config.static_all_moe_layers.clear()
        return None

    def _store(self, config: VllmConfig, replica: nn.Module) -> None:
        """Move loaded weights into the cell's memory, for the next process of the rank."""
        spec, compute = self.spec, partial(self._outcomes, config)
        try:
            if self.lasting is not None:
                memory, make = self.lasting.lasting.cell, self.lasting.make
                store_part(replica, (), memory, spec.rank, compute, make)
            elif spec.memory is not None:
                store_part(replica, (), spec.memory, spec.rank, compute)
        except Exception as error:  # noqa: BLE001 -- the rank has its weights and serves
            log.warning("part_not_stored", reason=str(error), instead="a restart reads them")
            if self.lasting is not None:
                self.lasting.drop()

    def _outcomes(self, config: VllmConfig, replica: nn.Module) -> Outcomes:
        """Return what the next process must compute too; of a part these are layers alone."""
        if self.spec.parts > 1:
            return outcomes_of(replica)
        return outcomes_of_model(replica, config, self.device)

    def _share_parts(self, part: nn.Module, stored: StoredPart | None) -> Borrowing:
        spec, widest = self.spec, self.communicators.of_width(self.spec.widest)
        place = Place(spec.rank, spec.rank - spec.rank % spec.widest, spec.widest, spec.parts)
        return share_parts(
            part,
            place,
            self.device,
            memory=spec.memory,
            cpu_group=widest.group.cpu_group,
            # The others of a rank that joins serving ones have filled their memory long ago.
            meet=(lambda: None) if spec.joins else widest.group.barrier,
            stored=stored,
            whole_layers=self._whole_layers(widest),
        )

    def _whole_layers(self, widest: Communicator) -> AutoWhole | int:
        """Return the number of whole layers, or how the ranks of a group that start decide it."""
        spec = self.spec
        if spec.whole_layers != "auto":
            return spec.whole_layers
        if spec.joins and spec.memory is not None:
            # The others serve, so it cannot measure as they did.
            return StartupMeasurements.load(spec.memory, spec.rank).whole_layers

        def largest(number: int) -> int:
            own = torch.tensor([number], device=self.device)
            return int(widest.group.all_gather(own, dim=0).max())

        return AutoWhole(spec.floor_goal_s, room_for_whole(self.base, self.device), largest)

    def _borrowing_tree(self, replica: nn.Module) -> nn.Module:
        """Build the tree that computes alone with parts of all ranks."""
        key, borrowing = ModeKey(Mode.DP, 1), self.borrowing
        assert borrowing is not None, "it was loaded before."
        activate(self.communicators.of_width(1))
        with set_current_vllm_config(self.configs[key]):
            tree = build_borrowing_tree(
                self.configs[key],
                replica,
                borrowing.units,
                borrowing.ring,
                shards=self.spec.widest,
            )
        self._require_views(str(key), tree, replica)
        return tree

    def _config_of_part(self, parts: int) -> VllmConfig:
        return mode_config(self.base, ModeKey(Mode.TP, parts), LAYOUT.name)

    def _parted_over(self) -> Communicator:
        """Return the ranks that hold one part of the weights each and all together, in order."""
        shape = shape_of_parts(self.spec.widest, self.spec.parts)
        if shape is None:
            return self.communicators.of_width(self.spec.widest)
        return self.communicators.reducing(shape)

    def trees(self, replica: nn.Module, progress: Callable[[int, int], None]) -> Trees:
        """Build all trees, the replica first; `progress` is called with (done, total)."""
        wider = [key for key in self.keys if key.width > 1 and key.stages == 1]
        alone = self._borrowing_tree(replica) if self.borrows else replica
        made: Trees = {key: {key.mode: alone} for key in self.keys if key.width == 1}
        for done, key in enumerate(wider):
            progress(done, len(wider))
            communicator = self.communicators.of_width(key.width)
            tree = self._tp_tree(key.width, self.configs[key], replica, communicator)
            self._require_views(str(key), tree, replica)
            made[key] = {key.mode: tree}
        progress(len(wider), max(1, len(wider)))
        for key in self.keys:
            if key.stages > 1:
                made[key] = {Staged(key.stages, key.tp): self._stage_tree(key, replica)}
        firsts = ((next(iter(made[key].values())), self.configs[key]) for key in self.keys)
        fused = sum(fuse_rope(tree, config) for tree, config in firsts)
        for key in wider:
            self._add_sp(made[key], key, replica, alone)
        gates = sum(
            plug_silu(tree, self.configs[key]) for key in self.keys for tree in made[key].values()
        )
        self._prove_logits(made)
        log.info("trees_proved", layers=self._proved, fused_attentions=fused, gates=gates)
        return made

    def _tp_tree(
        self, width: int, config: VllmConfig, replica: nn.Module, communicator: Communicator
    ) -> nn.Module:
        """Build views of one of `width` parts of the weights, by this rank's place in a group."""
        activate(communicator)
        place = communicator.rank_in_group
        with set_current_vllm_config(config):
            tree = build_tp_tree(
                config, replica, shards=self.spec.widest, width=width, rank_in_group=place
            )
            self._prove(tree, replica, width, place)
        return tree

    def _stage_tree(self, key: ModeKey, replica: nn.Module) -> nn.Module:
        """Build the tree of this rank's stage: layers of the replica, or a part of each."""
        config = self.configs[key]
        activate(self.communicators.of_width(key.width, key.stages))
        place = self.communicators.of_width(key.tp).rank_in_group
        with set_current_vllm_config(config):
            tree = build_stage_tree(
                config, replica, shards=self.spec.widest, width=key.tp, rank_in_group=place
            )
            self._prove(tree, replica, key.tp, place)
        self._require_views(str(key), tree, replica)
        return tree

    def _prove(self, tree: nn.Module, replica: nn.Module, width: int, place: int) -> None:
        self._proved += prove_tree(
            tree,
            replica,
            width=width,
            rank_in_group=place,
            device=self.device,
            shards=self.spec.widest,
        )

    def _require_views(self, name: str, tree: nn.Module, replica: nn.Module) -> None:
        lent = () if self.borrowing is None else self.borrowing.lent
        foreign = foreign_bytes(tree, replica, lent)
        if foreign:
            raise ViewError(
                f"the {name} tree owns {foreign} bytes outside of the replica: leave its width out "
                "of --widths, and please report it with the model's config.json."
            )
        self.view_bytes[name] = foreign

    def _add_sp(
        self, trees: dict[StepMode, nn.Module], key: ModeKey, replica: nn.Module, alone: nn.Module
    ) -> None:
        """Add the sp tree and one tree per mixed shape, and prove their exchanges."""
        tp_tree, config = trees[Mode.TP], self.configs[key]
        model = self.base.model_config
        plan = HeadExchange(
            model.hf_text_config.num_attention_heads, model.get_total_num_kv_heads(), key.width
        )
        whole = self.communicators.of_width(key.width)
        if self.spec.parts == 1 or self.borrows:
            tree = build_sp_tree(alone, tp_tree, plan, whole.group, config)
            # Mixed shapes stay whole: their reductions would run beside their exchanges.
            if self.spec.borrow != "all" or self.spec.parts == 1:
                # A product of a loan cannot be computed in several calls.
                tree.exchange.parts_tried = self.spec.exchange_parts
            self._prove_exchange(tree)
            self._require_views(f"sp{key.width}", tree, replica)
            trees[Mode.SP] = tree
        for mixed in self.spec.mixed:
            if mixed.width != key.width or mixed.tp % self.spec.parts:
                continue  # Its parts are wider than those that the rank holds.
            reducing, part = self.communicators.reducing(mixed), replica
            if mixed.tp > self.spec.parts or self.spec.borrow == "ffn":
                part_config = self._config_of_part(mixed.tp)
                part = self._tp_tree(mixed.tp, part_config, replica, reducing)
            tree = build_mixed_tree(
                part,
                tp_tree,
                plan.part(mixed.tp),
                self.communicators.of_width(mixed.sp).group,
                config,
                name=str(mixed),
                reducing=reducing,
                whole=whole,
            )
            self._prove_exchange(tree)
            self._require_views(str(mixed), tree, replica)
            trees[mixed] = tree

    def _prove_logits(self, made: Trees) -> None:
        """Prove that every tree computes the replica's logits; a collective of all groups.

        Ranks that hold parts of the weights have no replica, and one that joins has no group yet.
        """
        first = self.keys[0]
        wider = [key for key in self.keys if key.width > 1 and key.stages == 1]
        if self.spec.parts > 1 or self.communicators.rehearses or not can_prove(self.base):
            return
        if not wider or first.width > 1:
            return
        try:
            self._compare_logits(made, first, wider)
        except StepUnprovedError as error:
            if self.device.type == "cpu":
                raise
            # A kernel may need what only a runner prepares; layers and exchanges are proved.
            log.warning("logits_not_proved", reason=str(error))

    def _compare_logits(self, made: Trees, first: ModeKey, wider: Sequence[ModeKey]) -> None:
        activate(self.communicators.of_width(1))
        replica, dtype = made[first][first.mode], self.base.model_config.dtype
        wanted = logits_of("the model", replica, replica, self.configs[first], self.device)
        for key in wider:
            activate(self.communicators.of_width(key.width))
            attending = made[key][Mode.TP]
            for mode, tree in made[key].items():
                name = f"the tree of {mode} {key.width} wide"
                logits = logits_of(name, tree, attending, self.configs[key], self.device)
                compare(name, logits, wanted, dtype)

    def _prove_exchange(self, tree: SequenceParallel) -> None:
        # A rank that joins serving ones has nobody to exchange with; these proved it at start-up.
        if not self.communicators.rehearses:
            prove_exchange(tree.exchange, self.device)
