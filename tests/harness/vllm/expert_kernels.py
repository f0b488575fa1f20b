"""Quantized experts on CPU: vLLM's methods with a kernel in plain torch in place of its own.

What loads, quantizes and describes the experts is vLLM's. `RankedExperts` gives kernels on CPU the
numbers of a rank's own experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization import fp8, mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as compressed,
)
from vllm.model_executor.layers.quantization.online import fp8 as online

from tests.harness.vllm.block_kernels import spread
from tests.harness.vllm.mxfp4_models import dequantized
from tests.harness.vllm.trees import FP8, FP8_MAX


class TorchExperts(modular_kernel.FusedMoEExpertsModular):  # type: ignore[misc]
    """The sum of what experts give for each token, from weights with scales."""

    @staticmethod
    def activation_format() -> modular_kernel.FusedMoEActivationFormat:
        return modular_kernel.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> Any:  # noqa: N803
        return (0,), (0,), (M, K)

    def _weight(self, weights: torch.Tensor, scales: Any, expert: int) -> torch.Tensor:
        scale = scales[expert]
        if weights.dtype is torch.uint8:
            return dequantized(weights[expert], scale)
        weight = weights[expert].float()
        if self.block_shape is None:
            return weight * scale.reshape(-1, 1)
        return weight * spread(scale, self.block_shape, (weight.shape[0], weight.shape[1]))

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> None:
        """Numbers below zero are experts of other ranks."""
        output.zero_()
        scale = self._common_scale(hidden_states, w1, topk_ids)
        for expert in topk_ids[topk_ids >= 0].unique().tolist():
            chance = (topk_weights * (topk_ids == expert)).sum(1, keepdim=True)
            rows = self._rows(hidden_states, w1, expert)
            between = self._rounded(self._gated(rows), scale)
            given = between @ self._weight(w2, self.w2_scale, expert).t()
            if self.w2_bias is not None:
                given = given + self.w2_bias[expert].float()
            output += (given * chance).to(output.dtype)

    def _rows(self, hidden_states: torch.Tensor, w1: torch.Tensor, expert: int) -> torch.Tensor:
        rows = hidden_states.float() @ self._weight(w1, self.w1_scale, expert).t()
        return rows if self.w1_bias is None else rows + self.w1_bias[expert].float()

    def _common_scale(
        self, hidden_states: torch.Tensor, w1: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor | None:
        """What vLLM's kernels divide the numbers of all tokens by, where they have one scale."""
        is_fp8 = self.quant_dtype == FP8 and self.a2_scale is None
        if not is_fp8 or self.block_shape is not None or self.per_act_token_quant:
            return None
        largest = [
            self._gated(self._rows(hidden_states[(topk_ids == expert).any(1)], w1, expert)).abs()
            for expert in topk_ids[topk_ids >= 0].unique().tolist()
        ]
        return torch.stack([each.max() for each in largest if each.numel()]).max() / FP8_MAX

    def _rounded(self, between: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return between
        return (between / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale

    def _gated(self, rows: torch.Tensor) -> torch.Tensor:
        alpha, limit = self.quant_config.gemm1_alpha, self.quant_config.gemm1_clamp_limit
        if alpha is None:
            gate, up = rows.chunk(2, 1)
            return functional.silu(gate) * up
        gate, up = rows[:, ::2].clamp(max=limit), rows[:, 1::2].clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)


class MappedExperts(TorchExperts):
    """The same for layers that give their kernel the numbers of all experts."""

    def apply(self, *given: Any, **named: Any) -> None:
        """See vLLM's class."""
        if (own := named.get("expert_map")) is not None:
            named["topk_ids"] = own[named["topk_ids"].long()]
        super().apply(*given, **named)


def _choose(*_: Any, **__: Any) -> tuple[Fp8MoeBackend, type[TorchExperts]]:
    return Fp8MoeBackend.TRITON, TorchExperts


def _choose_mxfp4(*_: Any, **__: Any) -> tuple[Mxfp4MoeBackend, type[TorchExperts]]:
    return Mxfp4MoeBackend.EMULATION, MappedExperts


@contextmanager
def torch_experts_on_cpu() -> Iterator[None]:
    """Let vLLM choose this kernel wherever it looks for one of quantized experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mxfp4, "select_mxfp4_moe_backend", _choose_mxfp4)
        for module in (fp8, compressed, online):
            patch.setattr(module, "select_fp8_moe_backend", _choose)
        yield
