"""vLLM adapter: one engine configuration for the replica, and a shallow copy per mode.

vLLM reads its parallel size and KV layout from a `VllmConfig` while it builds modules, runners and
schedulers. Each mode gets a copy whose sub-configurations differ only where the mode does. Nothing
is validated again: vLLM's checks would refuse a tp size without that many workers.
"""

import copy
import os
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from comm_pool.layout import Mode
from coordinator.protocol.config import Config

EngineConfig = VllmConfig
"""vLLM's configuration; other modules pass it on without reading it."""

CPU_BLOCK_TOKENS = 32
"""Default tokens per slot on CPU; vLLM's CPU attention needs multiples of 32."""

COMPILATION_OPTIONS = {"--enforce-eager", "--no-enforce-eager", "-O", "--compilation-config"}

CUDA_COMPILATION = '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'
"""Full graphs for decode, captured per mode; compiled graphs would fix one group's name."""

CPU_KV_BYTES_MAX = 512 * 1024**2
"""Default maximum of KV memory per CPU rank."""

CPU_KV_SHARE = 0.25
"""Default share of the available memory that all CPU ranks together use for KV."""

CPU_MAX_NUM_SEQS = 64
"""Default maximum of running tasks of a group on CPU."""


ONLINE_FP8 = ("fp8_per_tensor", "fp8_per_channel")
"""vLLM's names for quantizing a bf16 checkpoint to fp8 while it is loaded."""

FP8_QUANTIZATIONS = ("fp8", "online", "compressed-tensors")
"""vLLM's quantization configurations that may hold fp8 weights that can be viewed."""


KV_BYTES = "--kv-cache-memory-bytes"


class EngineConfigError(ValueError):
    """A model or engine option that aileron cannot serve; the message suggests a remedy."""


def _available_memory_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def engine_arguments(config: Config) -> list[str]:
    """Return vLLM's command line for this cell: the user's options, then our defaults."""
    given = list(config.model.engine_args)
    names = {arg.split("=", 1)[0] for arg in given if arg.startswith("--")}
    arguments = ["--model", config.model.path, "--served-model-name", config.served_model_name]
    arguments += given
    if config.cell.device == "cpu":
        kv_bytes = int(_available_memory_bytes() * CPU_KV_SHARE / config.cell.ranks)
        defaults = {
            "--block-size": str(CPU_BLOCK_TOKENS),
            KV_BYTES: str(min(kv_bytes, CPU_KV_BYTES_MAX)),
            "--max-num-seqs": str(CPU_MAX_NUM_SEQS),
        }
        for name, value in defaults.items():
            if name not in names:
                arguments += [name, value]
        if not names & COMPILATION_OPTIONS:
            arguments.append("--enforce-eager")
    elif not names & COMPILATION_OPTIONS:
        arguments += ["--compilation-config", CUDA_COMPILATION]
    return arguments


def replica_config(config: Config) -> VllmConfig:
    """Return the configuration of a rank's full replica (tp 1); refuses what cannot be viewed."""
    for name in ("--tensor-parallel-size", "-tp", "--data-parallel-size", "-dp"):
        if any(arg.split("=", 1)[0] == name for arg in config.model.engine_args):
            raise EngineConfigError(
                f"leave out {name}: aileron decides the parallel size at run time; "
                "use --ranks and --layout."
            )
    shared = config.cell.device == "cuda" and config.cell.ranks_per_device > 1
    if shared and not any(arg.startswith(KV_BYTES) for arg in config.model.engine_args):
        raise EngineConfigError(
            f"cell.ranks_per_device above 1 needs {KV_BYTES}: ranks that start together cannot "
            "measure what each of them may take of a device."
        )
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(engine_arguments(config))
    vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    _refuse_unsupported(vllm_config)
    return vllm_config


def _quantization_refusal(vllm_config: VllmConfig) -> tuple[bool, str, str]:
    """Return (whether refused, what, the remedy); layers are checked again when loaded.

    This refuses early what the configuration shows, before minutes of loading.
    """
    quant, name = (
        vllm_config.quant_config,
        f"quantization {vllm_config.model_config.quantization!r}",
    )
    if quant is None:
        return False, name, ""
    instead = f"serve the bf16 checkpoint, also with --quantization {ONLINE_FP8[-1]} on CUDA"
    if current_platform.is_cpu():
        why = f"{name} on CPU, where vLLM's kernels pack weights so that they cannot be viewed,"
        return True, why, "serve a bf16, fp16 or fp32 checkpoint there"
    if quant.get_name() not in FP8_QUANTIZATIONS:
        return True, f"{name}, whose packed weights cannot be viewed per rank,", instead
    if getattr(quant, "online_quantization_config", None) is not None:
        return True, f"{name} together with --quantization-config", "leave the latter out"
    if getattr(quant, "kv_cache_scheme", None) is not None:
        return True, f"{name} with a quantized KV cache", f"take it out of config.json or {instead}"
    if not set(_weight_kinds(quant)) <= {"tensor", "channel", *ONLINE_FP8}:
        why = f"{name} with other weights than fp8 of per-tensor or per-channel scales"
        return True, f"{why} (block scales do not fall on the borders of ranks)", instead
    return False, name, ""


def _weight_kinds(quant: Any) -> list[str]:
    """Return the kinds of quantized linear layers: strategies, or vLLM's online shorthands."""
    if quant.get_name() == "fp8":
        return ["tensor" if quant.weight_block_size is None else "block"]
    if quant.get_name() == "compressed-tensors":
        return [_scheme_kind(scheme) for scheme in quant.target_scheme_map.values()]
    if quant.args.targets is not None:
        return list(quant.args.targets.values())
    # Import here, where vLLM has imported it already: its dependencies take seconds.
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8StaticChannelSym,
        kFp8StaticTensorSym,
    )

    spec = quant.args.linear
    plain = spec is not None and spec.weight in (kFp8StaticTensorSym, kFp8StaticChannelSym)
    return ["channel" if plain else "other"]


def _scheme_kind(scheme: dict[str, Any]) -> str:
    """Return the weights' strategy of a compressed-tensors scheme, if it is fp8 times fp8."""
    weights, inputs = scheme.get("weights"), scheme.get("input_activations")
    if weights is None or inputs is None:
        return "other"
    if any(each.num_bits != 8 or each.type != "float" for each in (weights, inputs)):
        return "other"
    return str(getattr(weights.strategy, "value", weights.strategy))


def _refuse_unsupported(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    refusals = [
        (vllm_config.lora_config is not None, "LoRA adapters", "leave out --enable-lora"),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding",
            "leave out --speculative-config",
        ),
        (
            vllm_config.kv_transfer_config is not None,
            "KV connectors",
            "leave out --kv-transfer-config",
        ),
        _quantization_refusal(vllm_config),
        (
            vllm_config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16"),
            f"KV cache type {vllm_config.cache_config.cache_dtype!r}",
            "leave out --kv-cache-dtype",
        ),
        (model.is_encoder_decoder, "encoder-decoder models", "serve a decoder-only model"),
        (model.runner_type != "generate", "pooling models", "serve a generating model"),
        (
            model.is_multimodal_model,
            "multimodal models",
            "serve a text model of the Llama, Qwen2, Qwen3, Qwen3-MoE or Mixtral family",
        ),
    ]
    for refused, what, instead in refusals:
        if refused:
            raise EngineConfigError(f"{what} cannot be served yet: {instead}.")


@dataclass(frozen=True, slots=True)
class ModeKey:
    """A mode and width that a rank has prepared objects for, such as tp2."""

    mode: Mode
    width: int

    def __str__(self) -> str:
        return f"{self.mode}{self.width}"


def thinned(sizes: list[int]) -> list[int]:
    """Return the batch sizes to capture: all up to 64, fewer above, and the largest.

    A wide mode's graphs use memory that KV lacks. Weights and KV dominate the time of a decode
    step, so up to a quarter more rows cost little.
    """
    steps = ((64, 1), (128, 16), (256, 32))

    def is_captured(size: int) -> bool:
        step = next((step for limit, step in steps if size <= limit), 64)
        return size % step == 0

    return [size for size in sizes if is_captured(size) or size == max(sizes)]


def mode_config(base: VllmConfig, key: ModeKey, layout: str = "LBHNC") -> VllmConfig:
    """Return a copy of `base` under which vLLM builds the objects of one mode.

    `static_forward_context` (layer name -> attention layer) is fresh, so that trees with equal
    layer names coexist; `additional_config` makes the configurations hash differently.
    """
    config = copy.copy(base)
    config.parallel_config = copy.copy(base.parallel_config)
    config.parallel_config.tensor_parallel_size = key.width
    # A rank's share of experts is a range of whole experts (worker/engine/weights/moe.py).
    config.parallel_config.enable_expert_parallel = key.width > 1 and base.model_config.is_moe
    config.cache_config = copy.copy(base.cache_config)
    config.cache_config.kv_cache_layout = layout
    config.compilation_config = copy.copy(base.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    # It would visit expert layers in the order of the tp tree, also in sp.
    config.compilation_config.fast_moe_cold_start = False
    sizes = config.compilation_config.cudagraph_capture_sizes
    if key.width > 1 and sizes:
        config.compilation_config.cudagraph_capture_sizes = thinned(sizes)
    config.scheduler_config = copy.copy(base.scheduler_config)
    additional: dict[str, Any] = dict(base.additional_config or {})
    config.additional_config = {**additional, "aileron_mode": str(key)}
    return config
