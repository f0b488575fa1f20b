"""vLLM adapter: fp8 weights, viewed per rank like any other; with block scales by fp8_blocks.py.

After vLLM's post-processing an fp8 weight is (K, N) with strides (1, K): in and out features. A
column-parallel share is a contiguous range of N, which vLLM's kernels accept. A row-parallel share
(o_proj, down_proj) is a range of K. From it vLLM's CUTLASS kernel silently computes garbage,
because it assumes packed strides. On Hopper GPUs those layers of a tp tree use our own kernel for
few tokens (fp8_kernel.py), otherwise `torch._scaled_mm`, which honours strides. A replica keeps
vLLM's own kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.kernels.linear import (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    CutlassFP8ScaledMMLinearKernel,
    FlashInferFP8ScaledMMLinearKernel,
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    PerTensorTorchFP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from worker.engine.weights.fp8_blocks import (
    PLAIN_BLOCK_KERNELS,
    check_blocks,
    check_share,
    keep_scales_by_inputs,
    share_of_blocks,
    view_block_kernel,
)
from worker.engine.weights.hopper import is_hopper
from worker.engine.weights.layers import ViewError, own_range

Fp8Kernel: TypeAlias = FP8ScaledMMLinearKernel | Fp8BlockScaledMMLinearKernel
"""vLLM's kernels of fp8 weights with few scales, or with one per block."""

UNPACKED_KERNELS = (
    CutlassFP8ScaledMMLinearKernel,
    FlashInferFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
    ChannelWiseTorchFP8ScaledMMLinearKernel,
)
"""vLLM kernels that keep an fp8 weight as loaded, a plain matrix."""

ALIGNMENT = 16
"""fp8 tensor cores need K and N of every operand to be a multiple of this many bytes."""

FEW_TOKENS = 256
"""Up to here reading the weight dominates a GEMM.

Our own kernel reads it where it can run; elsewhere scales are applied to an fp32 result, which is
small compared with the weight.
"""

MANY_TOKENS = 1024
"""From here on another pass over the result costs more than torch's row-wise kernel.

It takes 239 instead of 169 us for 4,096 tokens on an H200 (CUTLASS on packed weights: 161).
"""

PROOF_TOKENS = (8, 17, 40, 100, 256, 512, 1024)
"""Numbers of tokens with which the self-test covers every path on Hopper GPUs.

They cover each bucket of our kernel, which this compiles, and both paths for many tokens.
"""


PLAIN_KERNELS = (*UNPACKED_KERNELS, *PLAIN_BLOCK_KERNELS)
"""All vLLM kernels over weights that can be viewed."""


def kernel_of(layer: nn.Module) -> Fp8Kernel | None:
    """Return the fp8 kernel of a linear layer; None if it has none that we know."""
    for owner in (getattr(layer, "quant_method", None), getattr(layer, "scheme", None)):
        for name in ("fp8_linear", "kernel"):
            kernel = getattr(owner, name, None)
            if isinstance(kernel, (FP8ScaledMMLinearKernel, Fp8BlockScaledMMLinearKernel)):
                return kernel
    return None


def has_blocks(layer: nn.Module) -> bool:
    """Return whether a layer's weight is fp8 with a scale per block."""
    return isinstance(kernel_of(layer), Fp8BlockScaledMMLinearKernel)


def is_quantized(layer: nn.Module) -> bool:
    """Return whether a layer is a linear layer with anything but plain weights."""
    return isinstance(layer, LinearBase) and not isinstance(
        layer.quant_method, UnquantizedLinearMethod
    )


def check_quantized(name: str, layer: LinearBase) -> None:
    """Refuse a loaded layer whose weight is not a plain fp8 matrix (K, N) of strides (1, K).

    With block scales it is (N, K), as the checkpoint has it.

    Raises:
        ViewError: with the layer's name, why, and what to serve instead.
    """
    kernel = kernel_of(layer)
    # A fused silu-and-quantize would pass its result in a form whose shape cannot be undone.
    layer.requires_unquantized_input = isinstance(layer, RowParallelLinear)
    if isinstance(kernel, PLAIN_BLOCK_KERNELS):
        check_blocks(name, layer)
        keep_scales_by_inputs(layer)
        return
    instead = (
        "choose a kernel that keeps weights as they are with --linear-backend, such as triton, or "
        "serve a bf16 checkpoint, also with --quantization fp8_per_channel on Hopper GPUs."
    )
    if kernel is None or type(kernel) not in UNPACKED_KERNELS:
        found = type(layer.quant_method if kernel is None else kernel).__name__
        raise ViewError(
            f"layer {name} computes with {found}, which packs its weights, so they cannot be "
            f"viewed per rank: {instead}"
        )
    # Of a layer in several parts, the rank has loaded one.
    shape = layer.input_size_per_partition, layer.output_size_per_partition
    weight = layer.weight
    plain = tuple(weight.shape) == shape and weight.stride() == (1, shape[0])
    if weight.dtype != torch.float8_e4m3fn or not plain:
        raise ViewError(
            f"layer {name} has a {weight.dtype} weight of shape {tuple(weight.shape)} and strides "
            f"{weight.stride()}, not a plain fp8 matrix of shape {shape}: {instead}"
        )


def strided_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    unit: torch.Tensor,
) -> torch.Tensor:
    """(M, K) · (K, N) -> (M, N) of scaled fp8 matrices, with any distance between b's columns.

    Where scales are per token or channel, the fastest correct way depends on M: cuBLAS with the
    scales applied to its result beats torch's row-wise kernel for few tokens. For many, row-wise
    avoids a pass over an fp32 result, and a bf16 result takes token scales in place.

    Args:
        a: fp8, contiguous.
        b: fp8, K contiguous.
        scale_a: fp32, one element or (M, 1).
        scale_b: fp32, one element or (N, 1).
        out_dtype: of the result.
        unit: fp32, (1,), holding 1; made once, so that nothing is allocated for it per step.
    """
    per_channel = scale_b.numel() > 1
    if scale_a.numel() == 1 and not per_channel:
        return torch._scaled_mm(a, b, scale_a.view(1), scale_b.view(1), out_dtype=out_dtype)
    by_rows = a.shape[0] > FEW_TOKENS and out_dtype == torch.bfloat16
    if by_rows and (per_channel or a.shape[0] >= MANY_TOKENS):
        tokens = scale_a.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        channels = scale_b.view(1, -1).expand(1, b.shape[1]).contiguous()
        return torch._scaled_mm(a, b, tokens, channels, out_dtype=out_dtype)
    raw_dtype = out_dtype if by_rows else torch.float32
    raw = torch._scaled_mm(
        a, b, unit, unit if per_channel else scale_b.view(1), out_dtype=raw_dtype
    )
    if per_channel:
        raw.mul_(scale_b.view(1, -1))
    if raw_dtype is out_dtype:
        return raw.mul_(scale_a)
    # One pass scales and rounds: one more kernel per layer is 2 % of a decode step.
    return torch.mul(raw, scale_a, out=torch.empty_like(raw, dtype=out_dtype))


class StridedFp8Kernel(FP8ScaledMMLinearKernel):
    """vLLM's activation quantization, then a GEMM that takes a column range of a replica's weight.

    Inside one row-parallel layer K is a range of the replica's, so that (K, N) has strides
    (1, K of the replica).
    """

    def __init__(
        self,
        config: FP8ScaledMMLinearLayerConfig,
        names: "list[str] | tuple[str, ...]",
        device: torch.device,
    ) -> None:
        """`config` and `names` are those of the kernel that vLLM chose for the layer."""
        super().__init__(config, names)
        self.unit = torch.ones(1, dtype=torch.float32, device=device)
        self.prepare(device)

    def prepare(self, device: torch.device) -> None:
        """Choose the product for at most `FEW_TOKENS` tokens, and make its workspace."""
        self.few_tokens: Callable[..., torch.Tensor] | None = None
        self.proof_tokens: tuple[int, ...] = ()
        if is_hopper(device):
            from worker.engine.weights.fp8_kernel import few_tokens_mm, workspace_of

            self.few_tokens = partial(few_tokens_mm, workspace=workspace_of(device))
            self.proof_tokens = PROOF_TOKENS

    @classmethod
    def is_supported(
        cls,
        compute_capability: int | None = None,  # noqa: ARG003 -- vLLM's signature
    ) -> tuple[bool, str | None]:
        """Support any platform where torch has scaled fp8 GEMMs; the self-test verifies it."""
        return True, None

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Support per-tensor and per-channel weights; static, per-tensor, per-token activations."""
        scales = (c.weight_quant_key.scale, c.activation_quant_key.scale)
        if any(scale.group_shape.is_per_group() for scale in scales):
            return False, "takes no block scales"
        return True, None

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,  # noqa: N803 -- vLLM's name
        B: torch.Tensor,  # noqa: N803
        out_dtype: torch.dtype,
        As: torch.Tensor,  # noqa: N803
        Bs: torch.Tensor,  # noqa: N803
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        """(M, K) fp8 · (K, N) fp8 -> output_shape."""
        if self.few_tokens is not None and A.shape[0] <= FEW_TOKENS:
            return self.few_tokens(A, B, As, Bs, out_dtype, bias=bias).view(*output_shape)
        out = strided_scaled_mm(A, B, As, Bs, out_dtype, self.unit)
        if bias is not None:
            out = out + bias
        return out.view(*output_shape)


class ViewedFp8Method(LinearMethodBase):
    """A tp tree's linear method over weights that the replica's method has processed."""

    supports_pre_processed_weights = True

    def __init__(self, kernel: Fp8Kernel) -> None:
        self.fp8_linear = kernel

    def create_weights(self, layer: nn.Module, *args: object, **kwargs: object) -> None:
        """Never called: the layer exists."""
        raise AssertionError("a view creates no weights.")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing to do: the replica's weights are processed."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(T, K) -> (T, N)."""
        out: torch.Tensor = self.fp8_linear.apply_weights(layer, x, bias)
        return out


def adopt_methods(tree: nn.Module, replica: nn.Module) -> None:
    """Make a tree on meta compute with processed weights; call it before post-processing.

    Otherwise vLLM's post-processing would quantize meta tensors and all-reduce their ranges.
    Attention layers of a quantized model lose the scale parameters, which the replica's layers have
    consumed.
    """
    sources = dict(replica.named_modules(remove_duplicate=False))
    for name, module in tree.named_modules(remove_duplicate=False):
        source = sources.get(name)
        if source is None:
            continue
        if is_quantized(source):
            module.quant_method = ViewedFp8Method(_view_kernel(name, module, source))
            module.requires_unquantized_input = source.requires_unquantized_input
        elif isinstance(module, Attention):
            adopt_attention(module, source)


def adopt_attention(module: Attention, source: nn.Module) -> None:
    """Give an attention layer on meta what loading has left in the loaded one."""
    for spent in [each for each in module._parameters if each not in source._parameters]:
        del module._parameters[spent]
    module.quant_method = None  # It would read the consumed ones; only loading uses it.
    for scale in ("_q_scale_float", "_k_scale_float", "_v_scale_float", "_prob_scale_float"):
        if hasattr(source, scale):
            setattr(module, scale, getattr(source, scale))


def _view_kernel(name: str, module: LinearBase, source: LinearBase) -> Fp8Kernel:
    """Return the kernel for a share: vLLM's for a range of N, ours for a range of K."""
    chosen, whole = kernel_of(module), kernel_of(source)
    assert whole is not None, "check_quantized has seen the replica's kernel."
    if not isinstance(whole, FP8ScaledMMLinearKernel):
        return view_block_kernel(name, module, source, chosen)
    if isinstance(module, RowParallelLinear):
        return StridedFp8Kernel(whole.config, whole.layer_param_names, source.weight.device)
    if chosen is None or type(chosen) is not type(whole):
        raise ViewError(
            f"layer {name}: vLLM computes a share of it with {type(chosen).__name__} and the whole "
            f"with {type(whole).__name__}: choose one with --linear-backend, such as cutlass."
        )
    if hasattr(chosen, "logical_output_size"):
        # Processing sets it, but a view's weight is not processed.
        chosen.logical_output_size = module.output_size_per_partition
    return chosen


def bind_quantized(
    name: str, module: LinearBase, source: LinearBase, width: int, rank: int
) -> None:
    """Give a tree's layer its share of the replica's processed parameters, as views.

    Raises:
        ViewError: if a share would need padding, or cuts blocks that have one scale.
    """
    shape = (module.input_size_per_partition, module.output_size_per_partition)
    in_blocks = has_blocks(source)
    if in_blocks:
        check_share(name, module, source, width)
    elif any(size % ALIGNMENT for size in shape):
        raise ViewError(
            f"layer {name} has {shape[0]} inputs and {shape[1]} outputs per rank in width {width}; "
            f"fp8 kernels need multiples of {ALIGNMENT}: use smaller --widths or a bf16 checkpoint."
        )
    module._parameters.clear()
    for each, param in source._parameters.items():
        share = None
        if param is not None and in_blocks:
            share = share_of_blocks(module, source, each, width, rank)
        elif param is not None:
            share = share_of(module, each, param.data, width, rank)
        made = None if share is None else Parameter(share, requires_grad=False)
        module._parameters[each] = made
    found = tuple(module.weight.shape)
    assert found == (shape[::-1] if in_blocks else shape), f"{name} has a share of {found}."
    adopt_attributes(module, source)


def adopt_attributes(module: nn.Module, source: nn.Module) -> None:
    """Give a layer what processing has left on the loaded one, such as `input_scale = None`."""
    for each, value in vars(source).items():
        if not hasattr(module, each):
            setattr(module, each, value)


def share_of(
    module: LinearBase, name: str, full: torch.Tensor, width: int, rank: int
) -> torch.Tensor:
    """Return a rank's share of a processed parameter of the replica, or of its part.

    Column-parallel: a range of N of the weight (K, N), and the same of a bias (N,) and of channel
    scales (N, 1). Row-parallel: a range of K of the weight. All ranks share per-tensor scales.
    """
    column = isinstance(module, ColumnParallelLinear)
    if name == "weight" and not column:
        return own_range(full, 0, width, rank, module.input_size_per_partition)
    if name == "weight" or (column and full.numel() > 1):
        dim = 1 if name == "weight" else 0
        return own_range(full, dim, width, rank, module.output_size_per_partition)
    return full
