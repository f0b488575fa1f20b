"""fp8 experts on CPU: vLLM's methods with a kernel in plain torch in place of its Triton kernel.

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
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as compressed,
)
from vllm.model_executor.layers.quantization.online import fp8 as online

from tests.harness.vllm.block_kernels import spread


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
        scale, weight = scales[expert], weights[expert].float()
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
        output.zero_()
        for expert in topk_ids.unique().tolist():
            chance = (topk_weights * (topk_ids == expert)).sum(1, keepdim=True)
            rows = hidden_states.float() @ self._weight(w1, self.w1_scale, expert).t()
            gate, up = rows.chunk(2, 1)
            given = (functional.silu(gate) * up) @ self._weight(w2, self.w2_scale, expert).t()
            output += (given * chance).to(output.dtype)


def _choose(*_: Any, **__: Any) -> tuple[Fp8MoeBackend, type[TorchExperts]]:
    return Fp8MoeBackend.TRITON, TorchExperts


@contextmanager
def torch_experts_on_cpu() -> Iterator[None]:
    """Let vLLM choose this kernel wherever it looks for one of fp8 experts."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (fp8, compressed, online):
            patch.setattr(module, "select_fp8_moe_backend", _choose)
        yield
