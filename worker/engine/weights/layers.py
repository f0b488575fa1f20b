"""vLLM adapter: shard-major fused linear layers, plugged in through vLLM's own layer registry.

A replica stores qkv as `[q0 k0 v0 | q1 k1 v1 | …]` and gate_up as `[g0 u0 | g1 u1 | …]` for S
shards, so the rows of any tp rank up to width S are one contiguous range (Flying Serving's Model
Weights Manager, with one storage order instead of one GEMM per slice). A tree with n = S/k shards
restores natural order: qkv by one reorder of its output, gate_up by a free view, because
silu-and-mul is row-wise on (tokens·n, 2I/n). With fewer KV heads than shards, neighbouring shards
hold copies of one, because each rank's rows must be one range (docs/adr/0016).
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import Parameter
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.parameter import PerTensorScaleParameter

from coordinator.protocol.model_support import FAMILIES


class ViewError(ValueError):
    """A model whose weights cannot be viewed per rank; the message has the reason and a remedy."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Storage of a tree under construction: S shards in all, of which it holds S / width.

    `loads`: it is filled from a checkpoint. Other trees are built on meta and take the loaded
    weights. `head_whole`: the lm_head holds all S shards; `attention_whole`: layers of attention do
    too, and only feed-forward layers and experts S / width. `embeddings_whole`: token embeddings
    that are loaded have all rows. `unviewed`: the tree holds one shard as vLLM's own loader,
    quantization and kernels make it, and no other tree views it.
    """

    shards: int
    width: int
    loads: bool = False
    head_whole: bool = False
    attention_whole: bool = False
    embeddings_whole: bool = True
    unviewed: bool = False

    @property
    def held(self) -> int:
        """Shards in this tree, n."""
        return self.shards // self.width

    def of_attention(self) -> "ShardPlan":
        """Return the plan of this tree's layers of attention."""
        return replace(self, width=1) if self.attention_whole else self


_plan: ContextVar[ShardPlan | None] = ContextVar("shard_plan", default=None)
_gated: ContextVar[set[str] | None] = ContextVar("gated_modules", default=None)
"""The modules under construction that have a gate_up layer, by prefix: feed-forward layers."""
_NATURAL = ShardPlan(1, 1)


def is_unviewed(layer: nn.Module) -> bool:
    """Return whether a loaded layer is as vLLM's own rank has it, so that no tree may view it."""
    return bool(getattr(layer, "unviewed", False))


def builds_unviewed() -> bool:
    """Return whether layers under construction are as vLLM's own ranks have them."""
    plan = _plan.get()
    return plan is not None and plan.unviewed


@contextmanager
def building(plan: ShardPlan) -> Iterator[None]:
    """Build the layers inside shard-major under `plan`; outside they are vLLM's own."""
    token, gated = _plan.set(plan), _gated.set(set())
    try:
        yield
    finally:
        _plan.reset(token)
        _gated.reset(gated)


def _parent(prefix: str) -> str:
    return prefix.rpartition(".")[0]


def restore_natural_order(
    out: torch.Tensor, held: int, sizes: tuple[int, ...], copies: int = 1
) -> torch.Tensor:
    """(T, held·[q k v]) -> (T, [all q | all k | all v]); `sizes` are one shard's widths.

    Of `copies` neighbouring shards with equal k and v, it takes those of the first.
    """
    if held == 1:
        return out
    if out.is_cuda and copies == 1 and len(sizes) == 3 and sizes[1] == sizes[2]:
        from worker.engine.weights.reorder import reorder_qkv

        return reorder_qkv(out, held, sizes[0], sizes[1])
    source = out.unflatten(-1, (held, -1))
    steps = [1 if number == 0 else copies for number in range(len(sizes))]
    widths = [size * held // step for size, step in zip(sizes, steps, strict=True)]
    natural = out.new_empty((out.shape[0], sum(widths)))
    start = 0
    for part, size, step in zip(natural.split(widths, -1), sizes, steps, strict=True):
        part.unflatten(-1, (-1, size)).copy_(source[:, ::step, start : start + size])
        start += size
    return natural


def scatter_shards(
    param: Parameter, loaded: torch.Tensor, shards: int, start: int, size: int
) -> None:
    """Copy one natural tensor of shards·size rows into rows start..start+size of every shard."""
    if loaded.dim() < param.dim():
        loaded = loaded.unsqueeze(-1)  # Channel scales may be (rows,) on disk and (rows, 1) here.
    if loaded.shape[0] != shards * size:
        raise ViewError(
            f"a fused weight has {loaded.shape[0]} rows, not {shards} shards of {size}: "
            "choose --widths that divide the model's heads and intermediate size."
        )
    rows = param.data.unflatten(0, (shards, -1))[:, start : start + size]
    rows.copy_(loaded.unflatten(0, (shards, size)))


def own_shards(loaded: torch.Tensor, plan: ShardPlan, part: int) -> torch.Tensor:
    """Return the rows of a natural tensor that the `part`-th tree of the plan's width holds.

    A tensor that cannot be divided into shards is returned unchanged; `scatter_shards` refuses it.
    """
    if plan.width == 1 or loaded.shape[0] % plan.shards:
        return loaded
    first = part * plan.held
    return loaded.unflatten(0, (plan.shards, -1))[first : first + plan.held].flatten(0, 1)


def own_range(full: torch.Tensor, dim: int, width: int, rank: int, size: int) -> torch.Tensor:
    """View one of `width` equal ranges of `size`, of a tensor that is whole or an even part.

    The part contains the range. A tensor that cannot be divided so is returned unchanged, and the
    caller refuses its size.
    """
    held = full.shape[dim] // size if size else 0
    if not held or full.shape[dim] % size or width % held:
        return full
    return full.narrow(dim, rank % held * size, size)


def spread_scales(layer: LinearBase, sizes: tuple[int, ...], held: int) -> None:
    """Give a fused layer with per-tensor scales one scale per stored row block.

    vLLM brings q, k and v (gate and up) to one common scale after loading and takes
    `logical_widths` for their rows. Stored shard-major, the layer holds len(sizes)·held such
    blocks; with their widths, vLLM rescales each block with the scale that it was quantized with.
    """
    scale = getattr(layer, "weight_scale", None)
    if isinstance(scale, PerTensorScaleParameter):
        layer.logical_widths = list(sizes) * held
        scale.data = scale.data.repeat(held)


def place_scales(param: Parameter, loaded: torch.Tensor, parts: Sequence[int], count: int) -> None:
    """Write the per-tensor scale of these of the layer's `count` parts, for all of its shards.

    One scale for all parts (fused on disk) goes to the first block alone: unset blocks make vLLM
    skip the common scale.
    """
    if loaded.numel() == 1 and len(parts) == count:
        param.data[0].copy_(loaded.reshape(()))
        return
    for part, scale in zip(parts, loaded.reshape(-1).expand(len(parts)), strict=True):
        param.data[part::count].copy_(scale)


@QKVParallelLinear.register_oot
class ShardMajorQKV(QKVParallelLinear):
    """qkv stored shard-major; its output is in natural order [q | k | v] of the tree's heads.

    With `reorders` off, the rotary module after it (worker/engine/weights/rope.py) restores that
    order.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.plan = plan = (_plan.get() or _NATURAL).of_attention()
        if plan.attention_whole:
            kwargs["disable_tp"] = True
        given = inspect.signature(super().__init__).bind(*args, **kwargs)
        kv_heads = given.arguments.get("total_num_kv_heads") or given.arguments["total_num_heads"]
        if not plan.unviewed:
            given.arguments["total_num_kv_heads"] = max(kv_heads, plan.shards)
        super().__init__(*given.args, **given.kwargs)
        self.unviewed = plan.unviewed
        self.stored_copies = max(1, plan.shards // kv_heads)
        """Number of neighbouring shards of the replica that hold the same KV head."""
        self._cpu_skip_gemm_dispatch = True  # vLLM's CPU prepack would empty the weight.
        held = plan.held
        self.kv_copies = min(self.stored_copies, held)
        """The same for the shards in this tree."""
        self.shard_sizes = (
            self.num_heads * self.head_size // held,
            self.num_kv_heads * self.head_size // held,
            self.num_kv_heads * self.v_head_size // held,
        )
        spread_scales(self, self.shard_sizes, held)
        self.reorders = True

    def weight_loader_v2(
        self, param: Parameter, loaded_weight: torch.Tensor, loaded_shard_id: str | None = None
    ) -> None:
        """Load q, k or v (or all three, fused on disk) into every shard's rows."""
        if self.plan.unviewed:
            super().weight_loader_v2(param, loaded_weight, loaded_shard_id)
            return
        self.weight_loader(param, loaded_weight, loaded_shard_id)

    def weight_loader(
        self, param: Parameter, loaded_weight: torch.Tensor, loaded_shard_id: str | None = None
    ) -> None:
        """See `weight_loader_v2`."""
        if self.plan.unviewed:
            super().weight_loader(param, loaded_weight, loaded_shard_id)
            return
        shards, sizes = self.plan.shards, self.shard_sizes
        if isinstance(param, PerTensorScaleParameter):
            parts = range(3) if loaded_shard_id is None else ["qkv".index(loaded_shard_id)]
            place_scales(param, loaded_weight, parts, 3)
            return
        distinct = shards // self.stored_copies
        if loaded_shard_id is None:
            rows = [sizes[0] * shards, sizes[1] * distinct, sizes[2] * distinct]
            for name, part in zip("qkv", loaded_weight.split(rows), strict=True):
                self.weight_loader(param, part, name)
            return
        index = "qkv".index(loaded_shard_id)
        if index and self.stored_copies > 1:
            heads = loaded_weight.unflatten(0, (distinct, -1))
            loaded_weight = heads.repeat_interleave(self.stored_copies, 0).flatten(0, 1)
        own = own_shards(loaded_weight, self.plan, self.tp_rank)
        scatter_shards(param, own, self.plan.held, sum(sizes[:index]), sizes[index])

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, Parameter | None]:
        """(T, hidden) -> (T, [q | k | v]), or (T, n·[q k v]) with `reorders` off."""
        out, bias = self.stored(input_)
        return self.ordered(out), bias

    def stored(self, input_: torch.Tensor) -> tuple[torch.Tensor, Parameter | None]:
        """(T, hidden) -> (T, n·[q k v]): rows in stored order."""
        out: tuple[torch.Tensor, Parameter | None] = super().forward(input_)
        return out

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder this tree's stored rows as later layers expect them."""
        if not self.reorders:
            return rows
        return restore_natural_order(rows, self.plan.held, self.shard_sizes, self.kv_copies)


@MergedColumnParallelLinear.register_oot
class ShardMajorGateUp(MergedColumnParallelLinear):
    """gate_up stored shard-major; its output is viewed as (T·n, 2I/n) for a row-wise activation."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        plan = _plan.get()
        if plan is not None and not self.prefix.endswith("gate_up_proj"):
            raise ViewError(
                f"layer {self.prefix} is a fused layer that is not known to be followed by a "
                f"row-wise activation: serve a model of the {FAMILIES} family."
            )
        self.plan = plan or _NATURAL
        self.unviewed = self.plan.unviewed
        if (gated := _gated.get()) is not None:
            gated.add(_parent(self.prefix))
        self._cpu_skip_gemm_dispatch = True
        self.shard_sizes = tuple(
            size // self.plan.width // self.plan.held for size in self.output_sizes
        )
        spread_scales(self, self.shard_sizes, self.plan.held)

    def weight_loader_v2(
        self,
        param: Parameter,
        loaded_weight: torch.Tensor,
        loaded_shard_id: int | tuple[int, ...] | None = None,
    ) -> None:
        """Load gate or up (or both, fused on disk) into every shard's rows."""
        if self.plan.unviewed:
            super().weight_loader_v2(param, loaded_weight, loaded_shard_id)
            return
        self.weight_loader(param, loaded_weight, loaded_shard_id)

    def weight_loader(
        self,
        param: Parameter,
        loaded_weight: torch.Tensor,
        loaded_shard_id: int | tuple[int, ...] | None = None,
    ) -> None:
        """See `weight_loader_v2`."""
        if self.plan.unviewed:
            super().weight_loader(param, loaded_weight, loaded_shard_id)
            return
        shards, sizes = self.plan.shards, self.shard_sizes
        ids: Sequence[int]
        if loaded_shard_id is None:
            ids = range(len(sizes))
        else:
            ids = (loaded_shard_id,) if isinstance(loaded_shard_id, int) else loaded_shard_id
        if isinstance(param, PerTensorScaleParameter):
            place_scales(param, loaded_weight, ids, len(sizes))
            return
        if not isinstance(loaded_shard_id, int):
            parts = loaded_weight.split([sizes[i] * shards for i in ids])
            for index, part in zip(ids, parts, strict=True):
                self.weight_loader(param, part, index)
            return
        start = sum(sizes[:loaded_shard_id])
        own = own_shards(loaded_weight, self.plan, self.tp_rank)
        scatter_shards(param, own, self.plan.held, start, sizes[loaded_shard_id])

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, Parameter | None]:
        """(T, hidden) -> (T·n, [gate | up] of one shard)."""
        out, bias = super().forward(input_)
        return out.view(out.shape[0] * self.plan.held, -1), bias


@RowParallelLinear.register_oot
class ViewedRow(RowParallelLinear):
    """A row-parallel layer that undoes `ShardMajorGateUp`'s view before its GEMM."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        plan, gated = _plan.get(), _gated.get() or ()
        if plan is not None and plan.attention_whole and _parent(_prefix_of(kwargs)) not in gated:
            kwargs["disable_tp"] = True
        super().__init__(*args, **kwargs)
        self.unviewed = builds_unviewed()
        self._cpu_skip_gemm_dispatch = True

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, Parameter | None]:
        """(T·n, in/n) or (T, in) -> (T, out)."""
        if self.unviewed:
            # One shard has its rows already, and may have them quantized by the activation.
            return super().forward(input_)
        return super().forward(input_.reshape(-1, self.input_size_per_partition))


def _prefix_of(kwargs: dict[str, object]) -> str:
    return str(kwargs.get("prefix", ""))


@VocabParallelEmbedding.register_oot
class PlannedEmbedding(VocabParallelEmbedding):
    """A table of which a rank loads all rows if the plan says so, else its share of them.

    Of a whole table there is no masked look-up and no all-reduce, and trees that load nothing share
    it; of a share they have views.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        plan = _plan.get()
        if plan is not None and plan.loads and plan.embeddings_whole:
            kwargs["disable_tp"] = True
        super().__init__(*args, **kwargs)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """(T,) tokens -> (T, hidden); without reduction, zeros for tokens of other shares."""
        if self.tp_size == 1 or self.use_fused_embedding:
            out: torch.Tensor = super().forward(input_)
            return out
        # vLLM compiles its mask, which takes a CPU rank seconds and gains nothing.
        own = self.shard_indices
        rows = input_.long() - own.org_vocab_start_index
        is_own = (rows >= 0) & (rows < own.num_org_elements)
        found = self.quant_method.embedding(self, rows.where(is_own, 0))
        found = found.masked_fill_(~is_own.unsqueeze(-1), 0)
        return tensor_model_parallel_all_reduce(found) if self.reduce_results else found


@ParallelLMHead.register_oot
class PlannedHead(ParallelLMHead):
    """An lm_head that a rank holds whole if the plan says so, else its share of the vocabulary."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        plan = _plan.get()
        if plan is not None and plan.head_whole:
            kwargs["disable_tp"] = True
        super().__init__(*args, **kwargs)


def is_embedding(module: nn.Module) -> bool:
    """Return whether the module looks tokens up; an lm_head is a table as well."""
    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


for _ours in (ShardMajorQKV, ShardMajorGateUp, ViewedRow):
    # compressed-tensors checkpoints select layers by whether their class name contains "Linear".
    _ours.__name__ += "Linear"
