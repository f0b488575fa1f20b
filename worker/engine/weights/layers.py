"""vLLM adapter: linear layers whose weights ranks view, plugged in through vLLM's layer registry.

A replica stores qkv as `[q0 k0 v0 | q1 k1 v1 | …]` and gate_up as `[g0 u0 | g1 u1 | …]` for S
shards, so the rows of any tp rank up to width S are one contiguous range (Flying Serving's Model
Weights Manager, with one storage order instead of one GEMM per slice). A tree with n = S/k shards
restores natural order by one reorder of the output. It leaves a gate_up out whose activation is
row-wise on (tokens·n, 2I/n): there a view is free (`worker/engine/weights/gated.py`). With fewer KV
heads than shards, neighbouring shards hold copies of one, because each rank's rows must be one
range (docs/adr/0016). Layers that are not fused need no order: a rank's share is a range already.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import Parameter
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.parameter import BlockQuantScaleParameter, PerTensorScaleParameter

Output: TypeAlias = "torch.Tensor | tuple[torch.Tensor, Parameter | None]"
"""What a linear layer gives: its rows, and beside them a bias to add if the model asks for one."""


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

    def of_layer(self, arguments: Mapping[str, object]) -> "ShardPlan":
        """Return the plan of a layer with these arguments: every rank may have all of it."""
        return replace(self, width=1) if arguments.get("disable_tp") else self


_plan: ContextVar[ShardPlan | None] = ContextVar("shard_plan", default=None)
_gated: ContextVar[set[str] | None] = ContextVar("gated_modules", default=None)
"""The modules under construction that have a gate_up layer, by prefix: feed-forward layers."""
_NATURAL = ShardPlan(1, 1)


def is_unviewed(layer: nn.Module) -> bool:
    """Return whether a loaded layer is as vLLM's own rank has it, so that no tree may view it."""
    return bool(getattr(layer, "unviewed", False))


def sizes_of(layer: LinearBase) -> tuple[int, int]:
    """Return the inputs and outputs that a rank's layer computes with; replicated ones have all."""
    return (
        getattr(layer, "input_size_per_partition", layer.input_size),
        getattr(layer, "output_size_per_partition", layer.output_size),
    )


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
    """(…, held·[q k v]) -> (…, [all q | all k | all v]); `sizes` are one shard's widths.

    Of `copies` neighbouring shards with equal k and v, it takes those of the first.
    """
    if held == 1:
        return out
    if out.dim() != 2:
        flat = restore_natural_order(out.flatten(0, -2), held, sizes, copies)
        return flat.unflatten(0, out.shape[:-1])
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


def check_borders(layer: LinearBase, sizes: Sequence[int]) -> None:
    """Refuse a fused layer whose shards cut blocks that have one scale; `sizes` are a shard's."""
    block: Sequence[int] | None = getattr(layer, "weight_block_size", None)
    if block is not None and not is_unviewed(layer) and any(size % block[0] for size in sizes):
        raise ViewError(
            f"layer {layer.prefix} has blocks of {block[0]} rows with one scale, and shards of "
            f"{', '.join(map(str, sizes))} rows would cut them: use smaller --widths, or serve a "
            "bf16 checkpoint."
        )


def rows_per_shard(layer: LinearBase, param: Parameter, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shard's rows of a parameter; block scales have one for each block of rows."""
    if not isinstance(param, BlockQuantScaleParameter):
        return sizes
    return tuple(size // layer.weight_block_size[0] for size in sizes)


def with_rows(out: Output, change: Callable[[torch.Tensor], torch.Tensor]) -> Output:
    """Change the rows that a layer gives, in whichever form it gives them."""
    return (change(out[0]), out[1]) if isinstance(out, tuple) else change(out)


@QKVParallelLinear.register_oot
class ShardMajorQKV(QKVParallelLinear):
    """qkv stored shard-major; its output is in natural order [q | k | v] of the tree's heads.

    With `reorders` off, the rotary module after it (worker/engine/weights/rope.py) restores that
    order.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        plan = (_plan.get() or _NATURAL).of_attention()
        if plan.attention_whole:
            kwargs["disable_tp"] = True
        given = inspect.signature(super().__init__).bind(*args, **kwargs)
        self.plan = plan = plan.of_layer(given.arguments)
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
        # Models that split the output by these sizes see each head once.
        self.output_sizes: list[int] = [
            size // (self.kv_copies if number else 1)
            for number, size in enumerate(self.output_sizes)
        ]
        spread_scales(self, self.shard_sizes, held)
        check_borders(self, self.shard_sizes)
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
        shards, sizes = self.plan.shards, rows_per_shard(self, param, self.shard_sizes)
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

    def forward(self, input_: torch.Tensor) -> Output:
        """(…, hidden) -> (…, [q | k | v]), or (…, n·[q k v]) with `reorders` off."""
        return with_rows(super().forward(input_), self.ordered)

    def stored(self, input_: torch.Tensor) -> torch.Tensor:
        """(…, hidden) -> (…, n·[q k v]): rows in stored order."""
        out: Output = super().forward(input_)
        return out[0] if isinstance(out, tuple) else out

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder this tree's stored rows as later layers expect them."""
        if not self.reorders:
            return rows
        return restore_natural_order(rows, self.plan.held, self.shard_sizes, self.kv_copies)


@MergedColumnParallelLinear.register_oot
class ShardMajorMerged(MergedColumnParallelLinear):
    """Fused column-parallel layers, stored shard-major; the output is in natural order.

    With `row_wise` on, the output is a view of the stored order, for an activation that treats
    each row [gate | up] on its own; `ViewedRow` undoes the view.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.gather_output and self.tp_size > 1:
            raise ViewError(
                f"layer {self.prefix} gathers the output of fused layers, which have another order "
                "in each rank: use --widths 1."
            )
        plan = _plan.get() or _NATURAL
        self.plan = plan = plan.of_layer({"disable_tp": self.disable_tp})
        self.unviewed = plan.unviewed
        if (gated := _gated.get()) is not None:
            gated.add(_parent(self.prefix))
        self._cpu_skip_gemm_dispatch = True
        for size in self.output_sizes:
            if not plan.unviewed and size % plan.shards:
                raise ViewError(
                    f"layer {self.prefix} has a part of {size} rows, which width {plan.shards} "
                    "does not divide: use smaller --widths."
                )
        self.shard_sizes = tuple(size // self.plan.shards for size in self.output_sizes)
        spread_scales(self, self.shard_sizes, self.plan.held)
        check_borders(self, self.shard_sizes)
        self.row_wise = False

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
        shards, sizes = self.plan.shards, rows_per_shard(self, param, self.shard_sizes)
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

    def forward(self, input_: torch.Tensor) -> Output:
        """(…, T, hidden) -> (…, T, [gate | up]), or (…, T·n, [gate | up] of one shard)."""
        return with_rows(super().forward(input_), self._ordered)

    def _ordered(self, rows: torch.Tensor) -> torch.Tensor:
        held = self.plan.held
        if self.row_wise:
            *outer, tokens, _ = rows.shape
            return rows.view(*outer, tokens * held, -1)
        return restore_natural_order(rows, held, self.shard_sizes)


@ColumnParallelLinear.register_oot
class ViewedColumn(ColumnParallelLinear):
    """A column-parallel layer that stands alone: a rank's share is one range of its rows."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.unviewed = builds_unviewed()
        self._cpu_skip_gemm_dispatch = True


@ReplicatedLinear.register_oot
class ViewedReplicated(ReplicatedLinear):
    """A layer that every rank computes with in full."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.unviewed = builds_unviewed()
        self._cpu_skip_gemm_dispatch = True


@RowParallelLinear.register_oot
class ViewedRow(RowParallelLinear):
    """A row-parallel layer that undoes `ShardMajorMerged`'s view before its GEMM."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        plan, gated = _plan.get(), _gated.get() or ()
        if plan is not None and plan.attention_whole and _parent(_prefix_of(kwargs)) not in gated:
            kwargs["disable_tp"] = True
        super().__init__(*args, **kwargs)
        self.unviewed = builds_unviewed()
        self._cpu_skip_gemm_dispatch = True

    def forward(self, input_: torch.Tensor) -> Output:
        """(…, T·n, in/n) or (…, T, in) -> (…, T, out)."""
        size = self.input_size_per_partition
        # One shard has its rows already, and may have them quantized by the activation.
        if not self.unviewed and self.input_is_parallel and input_.shape[-1] != size:
            input_ = input_.reshape(*input_.shape[:-2], -1, size)
        out: Output = super().forward(input_)
        return out


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
        # A quantization that leaves it out may take it for a linear layer.
        self._cpu_skip_gemm_dispatch = True


def is_embedding(module: nn.Module) -> bool:
    """Return whether the module looks tokens up; an lm_head is a table as well."""
    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


for _ours in (ShardMajorQKV, ShardMajorMerged, ViewedColumn, ViewedReplicated, ViewedRow):
    # compressed-tensors checkpoints select layers by whether their class name contains "Linear".
    _ours.__name__ += "Linear"
