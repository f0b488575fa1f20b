"""vLLM adapter: one engine configuration for the replica, and a shallow copy per mode.

vLLM reads its parallel size and KV layout from a `VllmConfig` while it builds modules, runners and
schedulers. Each mode gets a copy whose sub-configurations differ only where the mode does. Nothing
is validated again: vLLM's checks would refuse a tp size without that many workers.
"""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from comm_pool.layout import Mode
from comm_pool.mixed import Staged
from coordinator.protocol.block_scales import ONLINE_BLOCKS
from coordinator.protocol.config import Config
from coordinator.protocol.engine_options import GivenOption, OptionError, last_value, read_options
from coordinator.protocol.kv_defaults import CPU_BLOCK_TOKENS, cpu_kv_bytes
from coordinator.protocol.model_support import (
    ENCODERS,
    FP8_QUANTIZATIONS,
    KV_CONNECTORS,
    KV_TYPES,
    LATENT_ATTENTION,
    LORA,
    MULTIMODAL,
    ONLINE_FP8,
    POOLING,
    RECURRENT,
    SPECULATION,
    Holding,
    cpu_quantization_refusal,
    kv_type_refusal,
    option_refusals,
    other_scales_refusal,
    packed_refusal,
    quantized_kv_refusal,
    refusal,
)
from coordinator.protocol.stored_quantization import (
    COMPRESSED,
    MODELOPT,
    MODELOPT_FP8,
    MXFP4_QUANTIZATIONS,
    is_plain_kv,
)
from kvadaptor.geometry import Split

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ModuleNotFoundError:  # vLLM 0.33 has it here.
    from vllm.entrypoints.common.cli_args import make_arg_parser

EngineConfig = VllmConfig
"""vLLM's configuration; other modules pass it on without reading it."""

COMPILATION_OPTIONS = {"--enforce-eager", "--optimization-level", "--compilation-config"}

CUDA_COMPILATION = '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'
"""Full graphs for decode, captured per mode; compiled graphs would fix one group's name."""

CPU_MAX_NUM_SEQS = 64
"""Default maximum of running tasks of a group on CPU."""


VIEWED_KINDS = frozenset(("tensor", "channel", "block", *ONLINE_FP8))
"""Kinds of fp8 weights that ranks can view."""

HOPPER = 9
"""The major number of compute capability of H100 and H200 GPUs."""

KV_BYTES = "--kv-cache-memory-bytes"


class EngineConfigError(ValueError):
    """A model or engine option that aileron cannot serve; the message suggests a remedy."""


def _available_memory_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def engine_arguments(config: Config) -> list[str]:
    """Return vLLM's command line for this cell: the user's options, then our defaults."""
    given = list(config.model.engine_args)
    options = _given_options(config)
    names = {option.name for option in options if last_value(options, option.name) is not None}
    if not _names_kv_bytes(options):
        names.discard(KV_BYTES)
    arguments = ["--model", config.model.path, "--served-model-name", config.served_model_name]
    arguments += given
    if config.cell.device == "cpu":
        kv_bytes = cpu_kv_bytes(_available_memory_bytes(), config.cell.ranks)
        defaults = {
            "--block-size": str(CPU_BLOCK_TOKENS),
            KV_BYTES: str(kv_bytes),
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
    given = _given_options(config)
    for sentence in option_refusals(given):
        raise EngineConfigError(sentence)
    shared = config.cell.device == "cuda" and config.cell.ranks_per_device > 1
    if shared and not _names_kv_bytes(given):
        raise EngineConfigError(
            f"cell.ranks_per_device above 1 needs {KV_BYTES}: ranks that start together cannot "
            "measure what each of them may take of a device."
        )
    parser = make_arg_parser(_Parser(prog="model.engine_args", add_help=False))
    args = parser.parse_args(engine_arguments(config))
    vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    cell = config.cell
    holding = Holding(max(cell.widths), cell.weight_parts, cell.borrow)
    _refuse_unsupported(vllm_config, holding)
    if holding.widest > 1 and not current_platform.is_cpu():
        choose_kernels(vllm_config, holding, current_platform.get_device_capability())
    return vllm_config


def choose_kernels(
    config: VllmConfig, holding: Holding, capability: tuple[int, int] | None
) -> None:
    """Choose kernels of quantized weights that ranks can view or lend, if the user does not.

    vLLM chooses kernels of experts by the width, also one that mixes the weights of several
    experts. Its choice for block-scaled fp8 can be viewed on Hopper GPUs; on later ones it packs
    the scales, and on earlier ones the weights.
    """
    quant = config.quant_config
    if quant is None or not quantizes_weights(config):
        return
    kernels, is_mxfp4 = config.kernel_config, quant.get_name() in MXFP4_QUANTIZATIONS
    kinds = set(_weight_kinds(quant)) if quant.get_name() in FP8_QUANTIZATIONS else {"other"}
    is_fp8 = kinds <= VIEWED_KINDS
    is_viewed = not holding.is_unviewed
    lends = holding.parts > 1 and holding.borrow != "none"
    chooses_experts = config.model_config.is_moe and kernels.moe_backend == "auto"
    if chooses_experts and (is_mxfp4 or is_fp8) and (is_viewed or lends):
        kernels.moe_backend = "marlin" if is_mxfp4 else "triton"
    major = capability[0] if capability is not None else 0
    has_blocks = is_fp8 and not kinds.isdisjoint(("block", ONLINE_BLOCKS))
    if has_blocks and is_viewed and major != HOPPER and kernels.linear_backend == "auto":
        kernels.linear_backend = "cutlass" if major > HOPPER else "triton"


def _names_kv_bytes(given: Sequence[GivenOption]) -> bool:
    """Return whether an option says how large the KV cache is; of 0 bytes it says nothing."""
    return (last_value(given, KV_BYTES) or "0").strip().strip("-0") != ""


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EngineConfigError(f"model.engine_args: {message}.")


def _given_options(config: Config) -> list[GivenOption]:
    try:
        given, _ = read_options(config.model.engine_args)
    except OptionError as error:
        raise EngineConfigError(f"model.engine_args: {error}") from error
    return given


def _quantization_refusal(vllm_config: VllmConfig, holding: Holding) -> str | None:
    """Return why the quantization is refused; layers are checked again when loaded.

    This refuses early what the configuration shows, before minutes of loading.
    """
    quant, name = vllm_config.quant_config, str(vllm_config.model_config.quantization)
    if quant is None:
        return None
    kv = getattr(quant, "kv_cache_scheme", None)
    if kv is not None and not is_plain_kv(kv):
        return quantized_kv_refusal(name)
    if holding.is_unviewed or not quantizes_weights(vllm_config):
        return None
    if current_platform.is_cpu():
        return cpu_quantization_refusal(name, holding.widest)
    if quant.get_name() in MXFP4_QUANTIZATIONS:
        return None  # Of experts alone: their layers are checked.
    if quant.get_name() not in FP8_QUANTIZATIONS:
        return packed_refusal(name, holding.widest)
    if getattr(quant, "online_quantization_config", None) is not None:
        return refusal(
            f"quantization {name!r} together with --quantization-config", "leave the latter out"
        )
    if not VIEWED_KINDS.issuperset(_weight_kinds(quant)):
        return other_scales_refusal(name, holding.widest)
    return None


def takes_views(vllm_config: VllmConfig) -> bool:
    """Return whether ranks of a wide group could view the weights, as the configuration shows."""
    return _quantization_refusal(vllm_config, Holding(widest=2)) is None


def quantizes_weights(vllm_config: VllmConfig) -> bool:
    """Return whether weights are quantized, not the KV cache alone."""
    quant = vllm_config.quant_config
    if quant is None:
        return False
    return quant.get_name() != COMPRESSED or bool(quant.target_scheme_map)


def _weight_kinds(quant: Any) -> list[str]:
    """Return the kinds of quantized linear layers: strategies, or vLLM's online shorthands."""
    if quant.get_name() == MODELOPT:
        return ["tensor" if quant.quant_method == MODELOPT_FP8 else "other"]
    if quant.get_name() == "fp8":
        return ["tensor" if quant.weight_block_size is None else "block"]
    if quant.get_name() == COMPRESSED:
        return [_scheme_kind(scheme) for scheme in quant.target_scheme_map.values()]
    if quant.args.targets is not None:
        return list(quant.args.targets.values())
    # Import here, where vLLM has imported it already: its dependencies take seconds.
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8Static128BlockSym,
        kFp8StaticChannelSym,
        kFp8StaticTensorSym,
    )

    spec = quant.args.linear
    kinds = {
        kFp8StaticTensorSym: "tensor",
        kFp8StaticChannelSym: "channel",
        kFp8Static128BlockSym: "block",
    }
    return [kinds.get(spec.weight, "other") if spec is not None else "other"]


def _scheme_kind(scheme: dict[str, Any]) -> str:
    """Return the weights' strategy of a compressed-tensors scheme, if it is fp8 times fp8."""
    weights, inputs = scheme.get("weights"), scheme.get("input_activations")
    if weights is None or inputs is None:
        return "other"
    if any(each.num_bits != 8 or each.type != "float" for each in (weights, inputs)):
        return "other"
    return str(getattr(weights.strategy, "value", weights.strategy))


def _refuse_unsupported(vllm_config: VllmConfig, holding: Holding) -> None:
    model, kv_type = vllm_config.model_config, str(vllm_config.cache_config.cache_dtype)
    refusals = [
        (vllm_config.lora_config is not None, LORA),
        (vllm_config.speculative_config is not None, SPECULATION),
        (vllm_config.kv_transfer_config is not None, KV_CONNECTORS),
        (kv_type not in KV_TYPES, kv_type_refusal(kv_type)),
        (model.is_encoder_decoder, ENCODERS),
        (model.runner_type != "generate", POOLING),
        (model.supports_multimodal_inputs, MULTIMODAL),
        (model.use_mla, LATENT_ATTENTION),
        (model.is_hybrid or model.is_attention_free, RECURRENT),
    ]
    found = next((sentence for refused, sentence in refusals if refused), None)
    if (sentence := found or _quantization_refusal(vllm_config, holding)) is not None:
        raise EngineConfigError(sentence)


@dataclass(frozen=True, slots=True)
class ModeKey:
    """A mode and width that a rank has prepared objects for, such as tp2."""

    mode: Mode
    width: int
    stages: int = 1
    """The pipeline stages of its groups; 1 if they are no pipeline groups."""

    @property
    def split(self) -> Split:
        """How its groups divide KV."""
        return Split(self.stages, self.tp)

    @property
    def tp(self) -> int:
        """The parts in which its groups, or each of their stages, divide the weights."""
        return self.width // self.stages

    def __str__(self) -> str:
        return str(Staged(self.stages, self.tp)) if self.stages > 1 else f"{self.mode}{self.width}"


SPARSE_SIZES = (1, 8, 32, 128)
"""Batch sizes to capture, besides the largest one, where loans take longer than decodes."""


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


def sparse(sizes: list[int]) -> list[int]:
    """Return the batch sizes to capture where loans take longer than decodes: few.

    A step of fewer rows than its graph waits no longer for its loans, and every graph takes memory
    that KV lacks.
    """
    return [size for size in sizes if size in SPARSE_SIZES or size == max(sizes)]


def mode_config(
    base: VllmConfig, key: ModeKey, layout: str = "LBHNC", *, borrows: bool = False
) -> VllmConfig:
    """Return a copy of `base` under which vLLM builds the objects of one mode.

    `borrows`: its steps borrow weights.

    `static_forward_context` (layer name -> attention layer) is fresh, so that trees with equal
    layer names coexist; `additional_config` makes the configurations hash differently.
    """
    config = copy.copy(base)
    config.parallel_config = copy.copy(base.parallel_config)
    config.parallel_config.tensor_parallel_size = key.tp
    config.parallel_config.pipeline_parallel_size = key.stages
    # A rank's share of experts is a range of whole experts (worker/engine/weights/moe.py).
    config.parallel_config.enable_expert_parallel = key.tp > 1 and base.model_config.is_moe
    config.cache_config = copy.copy(base.cache_config)
    config.cache_config.kv_cache_layout = layout
    config.compilation_config = copy.copy(base.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    # It would visit expert layers in the order of the tp tree, also in sp.
    config.compilation_config.fast_moe_cold_start = False
    sizes = config.compilation_config.cudagraph_capture_sizes
    if sizes and (borrows or key.width > 1):
        fewer = sparse(sizes) if borrows else thinned(sizes)
        config.compilation_config.cudagraph_capture_sizes = fewer
    additional: dict[str, Any] = dict(base.additional_config or {})
    config.additional_config = {**additional, "aileron_mode": str(key)}
    return config
