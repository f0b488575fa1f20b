"""What sizes need to know of a model, of vLLM's options and of the devices. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.protocol.engine_options import GivenOption, is_on, last_value, size_value
from coordinator.protocol.held_weights import ElementBytes, element_bytes
from coordinator.protocol.kv_defaults import CPU_BLOCK_TOKENS, CUDA_BLOCK_TOKENS, cpu_kv_bytes
from coordinator.protocol.model_check import UTILIZATION
from coordinator.protocol.model_length import model_length
from coordinator.protocol.model_size import ModelSize, model_size
from coordinator.sizing.device_memory import CONTEXT, DRIVER, StepLimits, default_limits
from kvadaptor.geometry import PageGeometry


@dataclass(frozen=True, slots=True)
class Device:
    """The memory of each GPU, or of the whole machine on CPU."""

    kind: str
    """`cuda` or `cpu`."""
    memory_bytes: int
    """What nvidia-smi lists."""
    share: float = 1.0
    """Share of a GPU that vLLM uses."""
    kv_bytes: int | None = None
    """KV memory of each rank, if it does not follow from what the weights leave."""

    @property
    def room_bytes(self) -> int:
        """What ranks may use of it, in all."""
        if self.kind == "cpu":
            return self.memory_bytes
        offered = self.memory_bytes - DRIVER
        return min(int(offered * self.share), offered - CONTEXT)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What sizes need to know of the model and of vLLM's options."""

    size: ModelSize
    element: ElementBytes
    limits: StepLimits
    length: int
    """The longest request, prompt and answer."""
    block_tokens: int
    experts_per_token: int = 1
    eager: bool = False

    @property
    def geometry(self) -> PageGeometry:
        """The pages of its KV."""
        size = self.size
        return PageGeometry(
            num_layers=size.layers,
            num_kv_heads=size.kv_heads,
            head_dim_k=size.head_dim,
            head_dim_v=size.head_dim,
            dtype_bytes=self.element.kv,
            tokens_per_slot=self.block_tokens,
        )


def facts_of(
    config: Mapping[str, Any], given: Sequence[GivenOption], kind: str, memory_bytes: int
) -> ModelFacts | None:
    """Return the facts of the model of this config.json; None if it does not say its sizes.

    `kind` and `memory_bytes` are those of `Device`.
    """
    size = model_size(config)
    if size is None:
        return None
    usual = default_limits(memory_bytes)
    block_tokens = CPU_BLOCK_TOKENS if kind == "cpu" else CUDA_BLOCK_TOKENS
    return ModelFacts(
        size=size,
        element=element_bytes(config, given),
        limits=StepLimits(
            size_value(given, "--max-num-batched-tokens") or usual.tokens,
            size_value(given, "--max-num-seqs") or usual.tasks,
        ),
        length=size_value(given, "--max-model-len") or model_length(config),
        block_tokens=size_value(given, "--block-size") or block_tokens,
        experts_per_token=int(config.get("num_experts_per_tok") or 1),
        eager=is_on(given, "--enforce-eager"),
    )


def device_of(given: Sequence[GivenOption], kind: str, memory_bytes: int, ranks: int) -> Device:
    """Return the device of a cell of `ranks` ranks, with vLLM's options about its memory."""
    kv_bytes = size_value(given, "--kv-cache-memory-bytes") or None
    if kind == "cpu" and kv_bytes is None:
        kv_bytes = cpu_kv_bytes(memory_bytes, ranks)
    share = float(last_value(given, "--gpu-memory-utilization") or UTILIZATION)
    return Device(kind, memory_bytes, share, kv_bytes)
