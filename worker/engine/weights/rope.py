"""vLLM adapter: folds the reorder of a shard-major qkv output into the RoPE that follows it.

`fuse_rope` rewires the attention layers of one tree that holds n > 1 shards. qkv returns its rows
in stored order and QK-norms pass through. The rotary module runs one kernel over whole rows that
reorders, normalizes and rotates in place, so attention gets the same views as in plain vLLM. Only
layers whose modules are known to work together in exactly this way change; every other layer keeps
the separate reorder (docs/adr/0013).
"""

from dataclasses import dataclass

import torch
from torch import nn
from vllm import envs
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.mistral import MistralAttention
from vllm.model_executor.models.qwen2 import Qwen2Attention
from vllm.model_executor.models.qwen3 import Qwen3Attention

from worker.engine.weights.layers import ShardMajorQKV

KNOWN_ATTENTION = (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)
"""Attention classes whose forward splits qkv, norms q and k if at all, rotates both, then uses v.

Exact classes: a subclass may do something in between.
"""

HEAD_DIMS = (32, 64, 128, 256)
"""The kernel's tiles are powers of two, and so are the lanes whose order its norm repeats."""

NORM_KERNEL = "vllm_c"
"""vLLM's name of the rms_norm whose rounding our kernel repeats."""


class DeferredNorm(nn.Module):
    """Replaces a QK-norm that the fused kernel applies: has its name and weight, does nothing."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (T, heads, head_dim) unchanged, without a copy: it must stay a view of the row."""
        return x


@dataclass(frozen=True, slots=True)
class RowShape:
    """The layout of a row of a tree's qkv output: n shards with the same number of heads."""

    shards: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_width(self) -> int:
        """Elements of all query heads in a row."""
        return self.shards * self.q_heads * self.head_dim


class FusedRope(nn.Module):
    """A layer's rotary module that takes shard-major rows; same call as vLLM's.

    vLLM shares one rotary module between layers and trees for which `get_rope` gets equal
    arguments, so the original is only read here.
    """

    def __init__(
        self,
        rope: RotaryEmbedding,
        shape: RowShape,
        norms: tuple[DeferredNorm, DeferredNorm] | None,
    ) -> None:
        super().__init__()
        from worker.engine.weights.rope_kernel import rotate_shards

        self._launch = rotate_shards
        self.shape = shape
        # In tuples, so that they are not registered a second time under this module's name.
        self._shared = (rope,)
        self._norms = norms
        # A tp tree looks up its rotary module's children and buffers here, by name.
        self._modules = rope._modules
        self._buffers = rope._buffers

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rewrite the rows that begin with `query` (T, q width) and continue with `key` and v."""
        shape = self.shape
        assert key.storage_offset() == query.storage_offset() + shape.q_width, "not one qkv row"
        norm = None
        if self._norms is not None:
            q_norm, k_norm = self._norms
            norm = (q_norm.weight, k_norm.weight, q_norm.variance_epsilon)
        self._launch(
            query,
            positions,
            self._shared[0]._match_cos_sin_cache_dtype(query),
            shards=shape.shards,
            heads=(shape.q_heads, shape.kv_heads),
            head_dim=shape.head_dim,
            norm=norm,
        )
        return query, key


def fuse_rope(tree: nn.Module, config: VllmConfig, device_type: str = "cuda") -> int:
    """Fuse every attention layer of `tree` that allows it; `config` is the tree's own.

    The weights must be in place. Returns the number of fused layers. It is 0 on devices other than
    `device_type` (tests run the kernel's interpreter on cpu), under torch.compile, which must see
    what a kernel overwrites, and for trees of one shard. Calling it again changes nothing.
    """
    if config.device_config.device_type != device_type:
        return 0
    if config.compilation_config.mode not in (None, CompilationMode.NONE):
        return 0
    return sum(_fuse(layer, config) for layer in list(tree.modules()))


def _fuse(layer: nn.Module, config: VllmConfig) -> bool:
    if type(layer) not in KNOWN_ATTENTION:
        return False
    shape = _row_shape(layer.qkv_proj)
    if shape is None or not _is_plain_rope(layer.rotary_emb, shape.head_dim):
        return False
    named = ("q_norm", "k_norm")
    found = [getattr(layer, name) for name in named if hasattr(layer, name)]
    norms = None
    if found:
        if len(found) != len(named) or not _can_defer(found, shape.head_dim, config):
            return False
        norms = (DeferredNorm(found[0]), DeferredNorm(found[1]))
        layer.q_norm, layer.k_norm = norms
    layer.rotary_emb = FusedRope(layer.rotary_emb, shape, norms)
    layer.qkv_proj.reorders = False
    return True


def _row_shape(qkv: nn.Module) -> RowShape | None:
    """Return the shape of `qkv`'s rows; None if nothing needs reordering or tiles do not fit."""
    if not isinstance(qkv, ShardMajorQKV) or qkv.plan.held == 1 or qkv.kv_copies > 1:
        return None
    head_dim = qkv.head_size
    if qkv.v_head_size != head_dim or head_dim not in HEAD_DIMS:
        return None
    q_size, kv_size, _ = qkv.shard_sizes
    return RowShape(qkv.plan.held, q_size // head_dim, kv_size // head_dim, head_dim)


def _is_plain_rope(rope: nn.Module, head_dim: int) -> bool:
    """Return whether vLLM rotates with its base kernel; scaled variants differ in the cache."""
    if not isinstance(rope, RotaryEmbedding):
        return False
    kind = type(rope)
    return (
        kind.forward is CustomOp.forward
        and kind.forward_cuda is RotaryEmbedding.forward_cuda
        and kind._match_cos_sin_cache_dtype is RotaryEmbedding._match_cos_sin_cache_dtype
        and rope._forward_method != rope.forward_native
        and rope.is_neox_style
        and not rope.use_flashinfer
        and rope.rotary_dim == rope.head_size == head_dim
        and rope.cos_sin_cache.shape[-1] == head_dim
    )


def _can_defer(norms: list[nn.Module], head_dim: int, config: VllmConfig) -> bool:
    """Return whether vLLM would norm q and k per head with the kernel that ours repeats."""
    first = config.kernel_config.ir_op_priority.rms_norm[:1]
    return (
        all(
            type(norm) is RMSNorm
            and norm.has_weight
            and norm.variance_size_override is None
            and norm.weight.shape == (head_dim,)
            and norm.weight.dtype == config.model_config.dtype
            for norm in norms
        )
        and norms[0].variance_epsilon == norms[1].variance_epsilon
        and first == [NORM_KERNEL]
        and not envs.VLLM_BATCH_INVARIANT
    )
