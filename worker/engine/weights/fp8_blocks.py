"""vLLM adapter: fp8 weights with a scale per block, viewed where ranks' borders fall on blocks.

vLLM leaves such a weight as it is loaded, (N, K) with K contiguous, beside fp32 scales of
(N / rows, K / columns of a block). A column-parallel share is a range of rows of both, which every
kernel takes. A row-parallel share (o_proj, down_proj) is a range of K, so its rows lie as far apart
as the replica's. DeepGEMM gives that distance to the copy engine, and vLLM's Triton kernel takes
strides; CUTLASS assumes packed rows. On Hopper GPUs our own kernel takes its place for few tokens
(fp8_kernel.py), and for many CUTLASS computes with a copy; elsewhere the Triton kernel does.
DeepGEMM wants the scales in one piece or transposed so: a replica keeps those of its row-parallel
layers transposed beside the others (1/4,096 of the weight's bytes), where a range of K is one
piece.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.model_executor.kernels.linear import (
    BlockWiseTorchFP8ScaledMMLinearKernel,
    CutlassFp8BlockScaledMMKernel,
    DeepGemmFp8BlockScaledMMKernel,
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    TritonFp8BlockScaledMMKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import FP8BlockParams
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear

from worker.engine.weights.hopper import is_hopper
from worker.engine.weights.layers import ViewError, own_range

PLAIN_BLOCK_KERNELS = (
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    DeepGemmFp8BlockScaledMMKernel,
    CutlassFp8BlockScaledMMKernel,
    TritonFp8BlockScaledMMKernel,
    BlockWiseTorchFP8ScaledMMLinearKernel,
)
"""vLLM kernels that keep a block-scaled weight and its scales as loaded."""

STRIDED_BLOCK_KERNELS = (DeepGemmFp8BlockScaledMMKernel, TritonFp8BlockScaledMMKernel)
"""Those that honour the distance between a weight's rows."""

FLASHINFER_TOKENS = 32
"""Below this FlashInfer's kernel computes by itself, and from here on DeepGEMM does."""

COPY_TOKENS = 257
"""From here on the copy of a range of inputs costs less than CUTLASS gains over reading it."""

COLUMNS = 128
"""Of a block, and elements of a token, with one scale: what our kernel takes."""

PROOF_TOKENS = (8, 17, 40, 100, 256, 301, 512)
"""Numbers of tokens with which the self-test covers our kernel's buckets and the copy.

CUTLASS has another kernel where they are no multiple of 4.
"""

BY_INPUTS = "scales_by_inputs"
"""Name of a row-parallel layer's buffer of scales, (K / columns, N / rows of a block)."""


def layer_block(layer: LinearBase) -> tuple[int, int]:
    """Return the rows and columns of a block of a layer's weight."""
    rows, columns = layer.weight_block_size
    return rows, columns


def scale_name(layer: nn.Module) -> str:
    """Return the name of a layer's parameter with block scales."""
    return str(FP8BlockParams.from_layer(layer).block_scale_attr)


def block_scales(layer: nn.Module) -> torch.Tensor:
    """Return the block scales of a layer, (N / rows, K / columns of a block) fp32."""
    found: torch.Tensor = FP8BlockParams.from_layer(layer).block_scale.data
    return found


class BlockRangeKernel(CutlassFp8BlockScaledMMKernel):  # type: ignore[misc]
    """CUTLASS's products where the weight (N, K) is a range of a wider one's columns, on Hopper.

    Reading the weight dominates the product of few tokens, so it is read in place. For many tokens
    CUTLASS is twice as fast as Triton, and copying the range takes 3 % of 8,192 tokens' product.
    """

    def __init__(self, config: FP8ScaledMMLinearLayerConfig, device: torch.device) -> None:
        super().__init__(config)
        from worker.engine.weights.fp8_kernel import few_tokens_mm, workspace_of

        self.proof_tokens = PROOF_TOKENS
        rows = self.weight_group_shape.row
        self.few_tokens = partial(few_tokens_mm, workspace=workspace_of(device), scale_rows=rows)

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,  # noqa: N803 -- vLLM's name
        B: torch.Tensor,  # noqa: N803
        As: torch.Tensor,  # noqa: N803
        Bs: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """(M, K) fp8 · (N, K) fp8 -> (M, N), with scales (M, K / 128) and (N / rows, K / 128)."""
        if A.shape[0] < COPY_TOKENS:
            return self.few_tokens(A, B.t(), As, Bs, self.config.out_dtype)
        # Copying numbers of eight bytes takes a quarter of the time of single bytes.
        packed = B.view(torch.int64).contiguous().view(B.dtype)
        out: torch.Tensor = super().apply_block_scaled_mm(A, packed, As, Bs.contiguous())
        return out


def as_quantized(kernel: Fp8BlockScaledMMLinearKernel, x: torch.Tensor) -> torch.Tensor:
    """Return (T, K) as the kernel's product sees it, in fp32.

    FlashInfer's kernel quantizes few tokens itself, by scales that are no powers of two, and leaves
    others to DeepGEMM.
    """
    chosen: Any = kernel
    is_flashinfer = isinstance(kernel, FlashInferFp8DeepGEMMDynamicBlockScaledKernel)
    if is_flashinfer and (envs.VLLM_BATCH_INVARIANT or len(x) >= FLASHINFER_TOKENS):
        chosen = chosen.fallback
    quantized, scales = chosen.quant_fp8(x)
    each: torch.Tensor = scales.repeat_interleave(kernel.weight_group_shape.col, 1)[:, : x.shape[1]]
    return quantized.float() * each


def check_blocks(name: str, layer: LinearBase) -> None:
    """Refuse a loaded layer whose weight or scales are not as a checkpoint has them.

    Raises:
        ViewError: with the layer's name, and what to serve instead.
    """
    shape = layer.output_size_per_partition, layer.input_size_per_partition
    blocks = tuple(-(-size // block) for size, block in zip(shape, layer_block(layer), strict=True))
    weight, scales = layer.weight, block_scales(layer)
    plain = tuple(weight.shape) == shape and weight.is_contiguous()
    plain_scales = tuple(scales.shape) == blocks and scales.dtype == torch.float32
    if weight.dtype != torch.float8_e4m3fn or not (plain and plain_scales):
        raise ViewError(
            f"layer {name} has a {weight.dtype} weight of shape {tuple(weight.shape)} with "
            f"{scales.dtype} scales of shape {tuple(scales.shape)}, not a plain fp8 matrix of "
            f"shape {shape} with fp32 scales of shape {blocks}: choose a kernel that keeps them "
            "so with --linear-backend, such as triton, or serve a bf16 checkpoint."
        )


def keep_scales_by_inputs(layer: LinearBase) -> None:
    """Keep a loaded row-parallel layer's scales transposed too, so that a range of K is one piece.

    A layer of a process before has them already.
    """
    if isinstance(layer, RowParallelLinear) and BY_INPUTS not in layer._buffers:
        layer.register_buffer(BY_INPUTS, block_scales(layer).t().contiguous(), persistent=False)


def view_block_kernel(
    name: str, module: LinearBase, source: LinearBase, chosen: object
) -> Fp8BlockScaledMMLinearKernel:
    """Return the kernel for a share: the one that vLLM has chosen for it, if it takes the view.

    Raises:
        ViewError: if the kernel wants weights in another form than the loaded ones.
    """
    if not isinstance(chosen, PLAIN_BLOCK_KERNELS):
        raise ViewError(
            f"layer {name}: vLLM computes a share of it with {type(chosen).__name__}, which packs "
            "weights: choose another kernel with --linear-backend, such as cutlass."
        )
    own: Any = chosen
    if _is_range_of_inputs(module, source):
        if isinstance(own, FlashInferFp8DeepGEMMDynamicBlockScaledKernel):
            own = own.fallback
        is_ours = is_hopper(source.weight.device) and own.weight_group_shape.col == COLUMNS
        if is_ours and isinstance(own, CutlassFp8BlockScaledMMKernel):
            own = BlockRangeKernel(own.config, source.weight.device)
        elif not isinstance(own, STRIDED_BLOCK_KERNELS):
            own = TritonFp8BlockScaledMMKernel(own.config)
    kernel: Fp8BlockScaledMMLinearKernel = own
    return kernel


def share_of_blocks(
    module: LinearBase, source: LinearBase, name: str, width: int, rank: int
) -> torch.Tensor:
    """Return a rank's share of a parameter of the replica, or of its part.

    Column-parallel: a range of rows of the weight (N, K), of the scales and of a bias (N,).
    Row-parallel: a range of K of weight and scales.
    """
    full: torch.Tensor = source._parameters[name].data
    is_scale = name == scale_name(source)
    if name not in ("weight", "bias") and not is_scale:
        return full
    rows, columns = layer_block(module)
    if isinstance(module, ColumnParallelLinear):
        size = module.output_size_per_partition
        return own_range(full, 0, width, rank, size // rows if is_scale else size)
    if name == "bias" or not _is_range_of_inputs(module, source):
        return full
    size = module.input_size_per_partition
    if is_scale:
        return own_range(source._buffers[BY_INPUTS], 0, width, rank, size // columns).t()
    return own_range(full, 1, width, rank, size)


def check_share(name: str, module: LinearBase, source: LinearBase, width: int) -> None:
    """Refuse a share whose borders cut blocks.

    Raises:
        ViewError: names the layer and the width.
    """
    rows, columns = layer_block(module)
    for what, block, share, whole in (
        ("outputs", rows, module.output_size_per_partition, source.output_size_per_partition),
        ("inputs", columns, module.input_size_per_partition, source.input_size_per_partition),
    ):
        if share != whole and share % block:
            raise ViewError(
                f"layer {name} has {share} {what} per rank in width {width}, which cuts blocks of "
                f"{block} with one scale: use smaller --widths, or serve a bf16 checkpoint."
            )


def _is_range_of_inputs(module: LinearBase, source: LinearBase) -> bool:
    """Return whether a share's weight is a range of the columns of what the rank has loaded."""
    sizes = [each.input_size_per_partition for each in (module, source)]
    return isinstance(module, RowParallelLinear) and sizes[0] != sizes[1]
