"""vLLM adapter: the tree of a rank that computes with all weights but holds one part of them.

A rank that is alone computes the shares of the others itself, with parts that it borrows. Each
layer that the rank holds whole is the loaded module. In place of each unit that it holds a part of
stands a module with all parts: its own and, in slots of the ring, those of its peers. A part is
computed by the rank's own layer with another part's tensors, so whatever quantization and kernels
vLLM serves in tp, it serves here. Results of column-parallel parts and of parts of the vocabulary
stand side by side, those of row-parallel parts and of embeddings add up, as tp's all-reduce would
do.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from worker.engine.weights.fp8 import adopt_attention
from worker.engine.weights.layers import ShardMajorQKV, ShardPlan, ViewError, building
from worker.engine.weights.moe import is_shared, real_expert_maps
from worker.engine.weights.part_memory import TensorPlace, Unit, UnitKind, put_tensor
from worker.engine.weights.quantized_experts import make_kernels
from worker.engine.weights.ring import LoanRing
from worker.engine.weights.tree import adopt_meta, unbound_tensor


@dataclass(frozen=True, slots=True)
class UnitPart:
    """One part of a unit: its tensors, and the number of the loan that brings the large ones.

    `loan` is None for the part that the rank holds. Of a unit in pieces it is one piece of the
    part, from `first_row` on.
    """

    part: int
    loan: int | None
    tensors: Sequence[tuple[TensorPlace, torch.Tensor]]
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class BorrowedUnit:
    """A unit with all its parts, in the order in which the rank computes them: its own first."""

    unit: Unit
    parts: tuple[UnitPart, ...]
    ring: LoanRing
    """The ring of their loans."""

    def layers(self, part: UnitPart) -> dict[str, nn.Module]:
        """Return the unit's layers with a part's tensors; they reduce nothing."""
        made = {path: _shell(layer) for path, layer in self.unit.layers.items()}
        for layer in made.values():
            if isinstance(layer, LinearBase):
                layer.tp_rank = part.part
            if isinstance(layer, VocabParallelEmbedding):
                layer.tp_rank = part.part
                layer.shard_indices = layer._get_indices(
                    layer.num_embeddings_padded,
                    layer.org_vocab_size_padded,
                    layer.num_embeddings,
                    layer.org_vocab_size,
                    part.part,
                    layer.tp_size,
                )
            if isinstance(layer, (RowParallelLinear, VocabParallelEmbedding)):
                layer.reduce_results = False
        for place, tensor in part.tensors:
            put_tensor(made[place.layer], place, tensor)
        make_kernels(made.values())
        return made


def _shell(module: nn.Module) -> nn.Module:
    """Return a shallow copy whose tensors and children can be replaced on their own."""
    shell = copy.copy(module)
    for holder in ("_parameters", "_buffers", "_modules"):
        shell.__dict__[holder] = dict(getattr(module, holder))
    return shell


class BorrowedModule(nn.Module):
    """A module in several parts, each computed with the ring's permission."""

    def __init__(self, parts: Sequence[tuple[UnitPart, nn.Module]], ring: LoanRing) -> None:
        super().__init__()
        self.parts = nn.ModuleList(module for _, module in parts)
        self._places = tuple(part for part, _ in parts)
        # In a tuple, so that it is not registered as a child.
        self._ring = (ring,)

    def computed(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Compute the number-th part, the own one first."""
        loan = self._places[number].loan
        with nullcontext() if loan is None else self._ring[0].use(loan):
            return self.compute(self.parts[number], *args, **kwargs)

    def compute(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute one part while its tensors are in place."""
        return part(*args, **kwargs)


class BorrowedSum(BorrowedModule):
    """A module that gives the sum of its parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, hidden) or (T,) tokens -> (T, hidden)."""
        total: torch.Tensor = self.computed(0, x)
        for number in range(1, len(self.parts)):
            total = total.add_(self.computed(number, x))
        return total


class BorrowedFeedForward(BorrowedSum):
    """A feed-forward network."""


class BorrowedEmbeddings(BorrowedSum):
    """Token embeddings: each part gives the rows that it has, and zeros for other tokens."""


class BorrowedQKV(BorrowedModule):
    """qkv of all heads: the rows of its parts side by side, then in the order of `whole`."""

    def __init__(
        self,
        parts: Sequence[tuple[UnitPart, nn.Module]],
        ring: LoanRing,
        whole: ShardMajorQKV,
    ) -> None:
        super().__init__(parts, ring)
        # In a tuple: it has no weights of its own.
        self._whole = (whole,)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(T, hidden) -> (T, [q | k | v])."""
        return self._whole[0].ordered(self.stored(input_)), None

    def compute(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """See `BorrowedModule`."""
        return part.stored(*args, **kwargs)

    def stored(self, input_: torch.Tensor) -> torch.Tensor:
        """(T, hidden) -> (T, S·[q k v]): rows in stored order."""
        rows: torch.Tensor | None = None
        for number, place in enumerate(self._places):
            computed = self.computed(number, input_)
            if rows is None:
                rows = computed.new_empty((len(computed), len(self.parts), computed.shape[-1]))
            rows[:, place.part] = computed
        assert rows is not None
        return rows.flatten(1)


class BorrowedOutput(BorrowedModule):
    """o_proj over all heads: each part takes the columns of its own heads, and they add up."""

    skip_bias_add = False

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(T, heads·dim) -> (T, hidden)."""
        columns = input_.unflatten(-1, (len(self.parts), -1))
        total: torch.Tensor | None = None
        for number, place in enumerate(self._places):
            computed = self.computed(number, columns[:, place.part].contiguous())[0]
            total = computed if total is None else total.add_(computed)
        assert total is not None
        return total, None


class BorrowedExperts(BorrowedModule):
    """The experts of a layer: the sum of what each part's range of experts computes."""

    def compute(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """See `BorrowedModule`."""
        return part.forward_modular(*args, **kwargs)

    def take_place(self, own: RoutedExperts) -> RoutedExperts:
        """Return `own` without weights: vLLM's runner asks it for all but the computation."""
        shell = _shell(own)
        shell._parameters = dict.fromkeys(own._parameters)
        shell.forward_modular = self.forward
        return shell

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        """(T, hidden) and (T, top_k) weights and experts -> (T, hidden)."""
        total: torch.Tensor | None = None
        for number in range(len(self.parts)):
            # A kernel may compute in place of its input.
            computed = self.computed(number, x.clone(), topk_weights, topk_ids, *rest, **named)
            total = computed if total is None else total.add_(computed)
        assert total is not None
        return total


class BorrowedLmHead(BorrowedModule):
    """An lm_head: each part computes the logits of its range of the vocabulary, padding last.

    vLLM computes logits after the forward pass and its graph, so their loans are a sequence of
    their own: the ring is not the step's. `VocabParallelEmbedding`'s users ask it for the rest.
    """

    tp_size = 1

    def __init__(
        self, parts: Sequence[tuple[UnitPart, nn.Module]], ring: LoanRing, columns: int
    ) -> None:
        """`columns` are the rows of all parts."""
        super().__init__(parts, ring)
        self.columns = columns
        part_columns = columns // len({place.part for place in self._places})
        self._starts = [place.part * part_columns + place.first_row for place in self._places]

    @property
    def quant_method(self) -> "BorrowedLmHead":
        """What vLLM's logits processor applies."""
        return self

    def apply(
        self, _layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(T, hidden) -> (T, vocabulary with padding)."""
        assert bias is None, "an lm_head with a bias is not lent."
        logits: torch.Tensor = self(x)
        return logits

    def compute(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """See `BorrowedModule`."""
        (x,) = args
        return part.quant_method.apply(part, x, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, hidden) -> (T, vocabulary with padding)."""
        self._ring[0].begin_step()
        logits: torch.Tensor | None = None
        for number, start in enumerate(self._starts):
            computed = self.computed(number, x)
            if logits is None:
                logits = computed.new_empty((*computed.shape[:-1], self.columns))
            logits[..., start : start + computed.shape[-1]] = computed
        assert logits is not None
        return logits


def _put_together(borrowed: BorrowedUnit, source: nn.Module, own: nn.Module) -> nn.Module:
    """Return the module that takes the place of `own`, the unit's module in a tree on meta."""
    kind, ring = borrowed.unit.kind, borrowed.ring
    made: list[tuple[UnitPart, nn.Module]] = []
    for part in borrowed.parts:
        layers = borrowed.layers(part)
        if kind is UnitKind.FEED_FORWARD:
            module = _shell(source)
            module._modules.update(layers)
        else:
            module = layers[""]
        made.append((part, module))
    if kind is UnitKind.FEED_FORWARD:
        return BorrowedFeedForward(made, ring)
    if kind is UnitKind.OUTPUT:
        return BorrowedOutput(made, ring)
    if kind is UnitKind.QKV:
        assert isinstance(own, ShardMajorQKV), "the same layer of another tree"
        return BorrowedQKV(made, ring, own)
    if kind is UnitKind.EMBEDDINGS:
        return BorrowedEmbeddings(made, ring)
    if kind is UnitKind.LM_HEAD:
        assert isinstance(own, ParallelLMHead), "the same layer of another tree"
        return BorrowedLmHead(made, ring, own.num_embeddings_padded)
    assert isinstance(own, RoutedExperts), "the same layer of another tree"
    return BorrowedExperts(made, ring).take_place(own)


def build_borrowing_tree(
    config: VllmConfig,
    part: nn.Module,
    units: Mapping[str, BorrowedUnit],
    ring: LoanRing,
    *,
    shards: int,
) -> nn.Module:
    """Build the tree that computes alone, over a loaded part; vLLM's active tp group has one rank.

    `units` by name are all of which the rank holds a part; `ring` has the loans of its forward
    pass. The tree owns no tensor but those of its units. Raises `ViewError` for layers that cannot
    be put together.
    """
    model_config = config.model_config
    with (
        building(ShardPlan(shards, 1)),
        real_expert_maps(next(part.parameters()).device),
        set_default_torch_dtype(model_config.dtype),
        torch.device("meta"),
    ):
        tree = initialize_model(vllm_config=config, model_config=model_config)
    sources = dict(part.named_modules(remove_duplicate=False))
    _take_layers(tree, "", sources, units, model_config.dtype)
    if (name := unbound_tensor(tree)) is not None:
        raise ViewError(
            f"{name} cannot be computed in parts: use --borrow none, and please report it with the "
            "model's config.json."
        )
    tree.register_forward_pre_hook(lambda *_: ring.begin_step())
    return tree.eval()


def _take_layers(
    module: nn.Module,
    path: str,
    sources: Mapping[str, nn.Module],
    units: Mapping[str, BorrowedUnit],
    dtype: torch.dtype,
) -> None:
    """Replace the children that have weights, and give the others the loaded tensors."""
    source = sources[path]
    if isinstance(module, Attention):
        adopt_attention(module, source)
        module.process_weights_after_loading(dtype)
    adopt_meta(module, source)
    for name, param in module._parameters.items():
        if param is None or not param.is_meta:
            continue
        held = source._parameters[name]
        if held is None or held.shape != param.shape:
            raise ViewError(
                f"of {path}.{name} a rank holds a part of what it computes with alone, and ranks "
                "do not lend it: use --borrow none."
            )
        module._parameters[name] = held
    for name, child in list(module.named_children()):
        inner = f"{path}.{name}" if path else name
        if inner in units:
            module._modules[name] = _put_together(units[inner], sources[inner], child)
        elif isinstance(child, (LinearBase, VocabParallelEmbedding, RoutedExperts)) or is_shared(
            child
        ):
            module._modules[name] = sources[inner]
        else:
            _take_layers(child, inner, sources, units, dtype)
