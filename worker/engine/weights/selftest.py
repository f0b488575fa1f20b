"""vLLM adapter: proves at start-up that a module tree computes what a copy of its weights would.

A GEMM kernel that ignores strides, a share of the wrong rank or a wrong shard order gives fluent
garbage and no error. So one layer of each kind runs on random input, as in service but without its
all-reduce. The result is compared with an fp32 product of a contiguous copy of the rank's rows and
columns, selected by code that is independent of the code that made the view.
"""

import math
from collections.abc import Iterator

import torch
from torch import nn
from vllm.model_executor.kernels.linear import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from worker.engine.weights.fp8 import has_blocks, is_quantized, kernel_of
from worker.engine.weights.fp8_blocks import as_quantized, block_scales, layer_block
from worker.engine.weights.layers import (
    ShardMajorMerged,
    ShardMajorQKV,
    ViewError,
    is_unviewed,
    sizes_of,
)
from worker.engine.weights.moe import is_shared, prove_experts

DECODE_TOKENS = 8
PREFILL_TOKENS = 512
"""Tokens of the two test inputs: kernels differ between few and many.

A kernel of ours with more paths than two names its own numbers (`proof_tokens`).
"""

ERROR_MAX = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Largest relative error of any output column, by the type of the output.

Rounding stays ten times below (fp32 allows for TF32); a column of another row is off by 1.4.
"""

COLUMN_FLOOR = 0.1
"""Share of the typical column norm that is added to each, so that small ones are not all noise."""

COPY_ELEMENTS = 1 << 24
"""Largest contiguous copy at a time, 64 MiB in fp32; larger layers are compared in pieces."""


def prove_tree(
    tree: nn.Module,
    replica: nn.Module,
    *,
    width: int,
    rank_in_group: int,
    device: torch.device,
    shards: int,
) -> int:
    """Prove a tree of a width against the replica's weights; the replica itself is of width 1.

    If a rank holds one of several parts of a layer, the part serves as the replica's layer. Call it
    on the rank's device, with the tree's configuration as vLLM's current one. It communicates
    nothing, so it needs no group.

    Returns:
        The number of layers proved, one of each kind.

    Raises:
        ViewError: names the layer, its error and a remedy.
    """
    sources = dict(replica.named_modules(remove_duplicate=False))
    proved: set[tuple[object, ...]] = set()
    with torch.no_grad():
        for name, layer in tree.named_modules(remove_duplicate=False):
            if not isinstance(layer, (LinearBase, ParallelLMHead)) or is_shared(layer):
                continue
            kind = _kind(layer)
            if kind in proved:
                continue
            source = sources[name]
            if is_unviewed(layer):
                if tree is replica:
                    _check_unviewed(name, layer, device)
                proved.add(kind)
                continue
            if isinstance(source, ParallelLMHead):
                # By rows: a layer tied to the embeddings is whole in every rank.
                held = len(source.weight) // len(layer.weight)
                inner_width, inner_shards = held, shards
            else:
                # Of some layers a rank may hold a part, and of others all.
                inner_width, inner_shards = 1, shards
                if not isinstance(layer, ReplicatedLinear):
                    inner_width = layer.tp_size // source.tp_size
                    inner_shards = shards // source.tp_size
            _prove_layer(
                name,
                layer,
                source,
                width=inner_width,
                rank=rank_in_group % inner_width,
                shards=inner_shards,
                device=device,
            )
            proved.add(kind)
    if not proved:
        raise ViewError(
            "the model has none of vLLM's parallel layers, so ranks cannot share its weights: "
            "serve a model that vLLM computes in tp."
        )
    if tree is replica:
        return len(proved)
    experts = prove_experts(tree, replica, width=width, rank_in_group=rank_in_group, device=device)
    return len(proved) + experts


def _check_unviewed(name: str, layer: LinearBase, device: torch.device) -> None:
    """Run a layer as vLLM has made it, which has nothing of ours to be proved.

    Its kernel may be missing on this device, which vLLM notices in the first step alone.
    """
    inputs, outputs = sizes_of(layer)
    for tokens in (DECODE_TOKENS, PREFILL_TOKENS):
        draw = torch.Generator().manual_seed(tokens)
        x = torch.randn((tokens, inputs), generator=draw)
        fault = ""
        try:
            out = layer.quant_method.apply(layer, x.to(device, layer.params_dtype), None)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            fault = f"cannot run ({error})"
        else:
            if tuple(out.shape) != (tokens, outputs):
                fault = f"gives {tuple(out.shape)} for {tokens} tokens"
            elif not bool(out.isfinite().all()):
                fault = "gives numbers that are not finite"
        if fault:
            raise ViewError(
                f"self-test: layer {name}, computed by {type(layer.quant_method).__name__}, "
                f"{fault}: serve a checkpoint of another quantization, or choose another "
                "--linear-backend."
            )


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Return the kind of a layer: equal kinds run the same code on the same shapes."""
    if is_unviewed(layer):
        return (type(layer), type(layer.quant_method), type(kernel_of(layer)), sizes_of(layer))
    kernel = kernel_of(layer)
    return (
        type(layer),
        type(layer.quant_method),
        type(kernel),
        layer.weight.shape,
        layer.weight.stride(),
        layer.weight.dtype,
        getattr(layer, "bias", None) is not None,
    )


def _prove_layer(
    name: str,
    layer: nn.Module,
    source: nn.Module,
    width: int,
    rank: int,
    shards: int,
    device: torch.device,
) -> None:
    rows = _rows_of(source, width, rank, shards)
    columns = _columns_of(source, width, rank)
    dtype = source.weight.dtype if not is_quantized(source) else layer.orig_dtype
    computed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tokens in _token_counts(layer):
        x = torch.randn((tokens, len(columns)), generator=torch.Generator().manual_seed(tokens)).to(
            device, dtype
        )
        out = _run(layer, x, shards // width)
        if not getattr(layer, "reorders", True):
            # Rows in stored order: a later module reorders them. `rows` has the order.
            out = out[:, (rows - rank * len(rows)).to(device)]
        if tuple(out.shape) != (tokens, len(rows)):
            raise _refusal(name, width, rank, f"gives {tuple(out.shape)} for {tokens} tokens")
        computed.append((out, _as_computed(layer, x)))
    for start, copy in _copies(source, rows, columns, device):
        bias = _bias_of(source, rows[start : start + len(copy)], device)
        for out, exact_input in computed:
            wanted = exact_input @ copy.t()
            if bias is not None:
                wanted += bias
            error = column_error(out[:, start : start + len(copy)], wanted)
            if not error <= ERROR_MAX[out.dtype]:
                raise _refusal(
                    name, width, rank, f"is off by {error:.3g} (relative) with {len(out)} tokens"
                )


def _token_counts(layer: nn.Module) -> tuple[int, ...]:
    return getattr(kernel_of(layer), "proof_tokens", ()) or (DECODE_TOKENS, PREFILL_TOKENS)


def _refusal(name: str, width: int, rank: int, what: str) -> ViewError:
    return ViewError(
        f"self-test: layer {name} of rank {rank} in width {width} {what}, compared with a copy of "
        "its weights: the kernel or the view is wrong on this device. Serve an unquantized "
        "checkpoint, choose another --linear-backend, or leave this width out of --widths; and "
        "please report it with the model's config.json."
    )


def column_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest relative error of any column of (T, N); infinite if not all finite.

    One wrong row among thousands would vanish in the error of the whole.
    """
    size = wanted.float().norm(dim=0)
    error = (out.float() - wanted.float()).norm(dim=0)
    error = error / (size + COLUMN_FLOOR * size.mean()).clamp_min(torch.finfo(torch.float32).tiny)
    worst = float(error.max())
    return worst if math.isfinite(worst) else math.inf


def _run(layer: nn.Module, x: torch.Tensor, held: int) -> torch.Tensor:
    """(T, K) -> (T, N) in natural order, through the layer's own path up to its all-reduce."""
    if isinstance(layer, (ShardMajorQKV, ShardMajorMerged)):
        result = layer(x)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        if isinstance(layer, ShardMajorMerged) and layer.row_wise:
            # (T·n, [gate | up] of one shard), as its activation expects.
            parts = len(layer.output_sizes)
            out = out.reshape(x.shape[0], held, parts, -1).transpose(1, 2).reshape(x.shape[0], -1)
        return out
    return layer.quant_method.apply(layer, x, None)


def _as_computed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the fp32 input as the layer's GEMM sees it: rounded to fp8 if that computes in fp8."""
    kernel = kernel_of(layer)
    if kernel is None:
        return x.float()
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        return as_quantized(kernel, x)
    _, _, scale, bound = kernel._get_layer_params(layer)
    quantized, scales = kernel.quant_fp8(x, scale, bound)
    return quantized[: x.shape[0]].float() * scales


def _rows_of(source: nn.Module, width: int, rank: int, shards: int) -> torch.Tensor:
    """Return rows of the replica's stored weight (N, K), as this rank's natural outputs."""
    if isinstance(source, RowParallelLinear):
        return torch.arange(source.output_size)
    if isinstance(source, ShardMajorQKV):
        return stored_rows(source.output_partition_sizes, shards, width, rank, source.stored_copies)
    if isinstance(source, ShardMajorMerged):
        return stored_rows(source.output_partition_sizes, shards, width, rank)
    count = source.weight.shape[0]
    return torch.arange(rank * count // width, (rank + 1) * count // width)


def stored_rows(
    parts: list[int], shards: int, width: int, rank: int, copies: int = 1
) -> torch.Tensor:
    """Return where [q | k | v] (or [gate | up]) rows of one rank lie in a shard-major weight.

    Row i of a part with `size` rows is in shard i·shards // size; a shard has its piece of each
    part, in order. After q, `copies` neighbouring shards hold the same piece, which a rank's output
    has once.
    """
    found, start = [], 0
    stride = sum(parts) // shards
    for number, size in enumerate(parts):
        piece = size // shards
        natural = torch.arange(rank * size // width, (rank + 1) * size // width)
        if number and copies > 1:
            natural = natural.unflatten(0, (-1, piece))[:: min(copies, shards // width)].flatten()
        found.append(natural // piece * stride + start + natural % piece)
        start += piece
    return torch.cat(found)


def _columns_of(source: nn.Module, width: int, rank: int) -> torch.Tensor:
    """Return columns of the replica's weight (N, K) that multiply this rank's inputs."""
    if not isinstance(source, RowParallelLinear):
        return torch.arange(
            source.input_size if isinstance(source, LinearBase) else source.weight.shape[1]
        )
    size = source.input_size_per_partition
    return torch.arange(rank * size // width, (rank + 1) * size // width)


def _copies(
    source: nn.Module, rows: torch.Tensor, columns: torch.Tensor, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, fp32 copy of these rows and columns) in pieces, one alive at a time."""
    weight, is_scaled = source.weight.data, is_quantized(source)
    if is_scaled:
        # As bytes, because not every device gathers fp8.
        weight = (weight if has_blocks(source) else weight.t()).view(torch.uint8)
    first, last = int(columns[0]), int(columns[-1]) + 1
    step = max(1, COPY_ELEMENTS // len(columns))
    for start in range(0, len(rows), step):
        taken = rows[start : start + step].to(device)
        copy = weight[:, first:last].index_select(0, taken).contiguous()
        if is_scaled:
            factors = _factors_of(source, taken, first, last)
            yield start, copy.view(torch.float8_e4m3fn).float() * factors
        else:
            yield start, copy.float()


def _factors_of(source: nn.Module, rows: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return what these rows and this range of columns of a weight are scaled by.

    It has one column or all, and one row or all.
    """
    if has_blocks(source):
        height, width = layer_block(source)
        taken = block_scales(source).index_select(0, rows // height)
        return taken.repeat_interleave(width, 1)[:, first:last]
    factors: torch.Tensor = source.weight_scale.data.reshape(-1, 1)
    return factors.index_select(0, rows) if len(factors) > 1 else factors


def _bias_of(source: nn.Module, rows: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """Return the fp32 bias of these rows, for the layers that `_run` runs with their bias."""
    if not isinstance(source, (ShardMajorQKV, ShardMajorMerged)) or source.bias is None:
        return None
    return source.bias.data.float().index_select(0, rows.to(device))
