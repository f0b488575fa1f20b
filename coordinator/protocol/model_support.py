"""What ranks cannot serve, decided from config.json and vLLM's options. Pure.

The command line and the ranks' processes ask before they import vLLM; ranks ask again with vLLM's
own reading (worker/engine/config.py) and once more when they have the layers
(worker/engine/weights/tree.py). All of them use the sentences of this module.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comm_pool.head_exchange import ExchangeError, HeadExchange
from coordinator.protocol.block_scales import ONLINE_BLOCKS, cut_by
from coordinator.protocol.engine_options import GivenOption, is_on, last_value
from coordinator.protocol.held_weights import KV_BYTES
from coordinator.protocol.stored_quantization import (
    COMPRESSED,
    FIELDS,
    MODELOPT,
    MODELOPT_FP8,
    MXFP4_QUANTIZATIONS,
    StoredQuantization,
    object_of,
    stored_quantization,
)

ONLINE_FP8 = ("fp8_per_tensor", ONLINE_BLOCKS, "fp8_per_channel")
"""vLLM's names for quantizing a bf16 checkpoint to fp8 while it is loaded."""
FP8_QUANTIZATIONS = ("fp8", "online", COMPRESSED, MODELOPT)
"""vLLM's quantization configurations that may hold fp8 weights that can be viewed."""
KV_TYPES = ("auto", *KV_BYTES)
"""KV cache types that can be served."""

_INSTEAD_OF_QUANTIZED = (
    f"serve the bf16 checkpoint, also with --quantization {ONLINE_FP8[-1]} on CUDA"
)
_PARALLEL_OPTIONS = (
    *("--tensor-parallel-size", "--data-parallel-size", "--pipeline-parallel-size"),
    *("--decode-context-parallel-size", "--prefill-context-parallel-size"),
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
_EXPERTS = ("num_experts", "num_local_experts")
_SHARED_EXPERTS = (
    *("shared_expert_intermediate_size", "shared_intermediate_size"),
    *("n_shared_experts", "num_shared_experts", "intermediate_size_mlp"),
)
"""Fields of config.json that tell of an expert beside the chosen ones, which every token uses."""
_LAYER_TYPES = ("layer_types", "layers_block_type")
_RECURRENT = ("mamba_", "ssm_", "linear_attn_", "linear_num_", "lightning_", "state_size", "conv_L")
"""How the fields of config.json begin that describe layers with a recurrent state."""


_POOLING = ("Model", "Encoding", "Classification", "RewardModeling", "MaskedLM", "Ranking")
"""How the names of vLLM's classes of vectors and scores end."""
_GENERATING = ("LMModel", "HeadModel", "ChatModel", "AudioModel", "OmniModel", "UltravoxModel")
"""How names end that look like those and are of classes that make text."""


def refusal(what: str, instead: str) -> str:
    """Return the sentence about something that cannot be served."""
    return f"{what} cannot be served yet: {instead}."


LORA = refusal("LoRA adapters", "leave out --enable-lora")
SPECULATION = refusal("speculative decoding", "leave out --speculative-config")
KV_CONNECTORS = refusal("KV connectors", "leave out --kv-transfer-config")
ENCODERS = refusal("encoder-decoder models", "serve a decoder-only model")
POOLING = refusal("pooling models", "serve a generating model")
TEXT_ONLY = "--language-model-only"
MULTIMODAL = refusal(
    "multimodal models", f"add {TEXT_ONLY} to serve their text alone, or serve a text model"
)
RECURRENT = refusal(
    "layers with a recurrent state, which has no heads and pages to split,",
    "serve a model whose layers all have attention",
)
CHUNKED_ATTENTION = refusal(
    "attention in chunks, whose old pages vLLM gives up,",
    "serve a model with full attention or sliding windows",
)
ALIBI = refusal(
    "attention with ALiBi, whose slopes a rank has for its own heads alone,",
    "serve a model with rotary positions, or use --widths 1",
)
LATENT_ATTENTION = refusal(
    "latent attention, whose KV has no heads to split,", "serve a model with plain attention"
)


_NOT_BORROWED = "use --borrow none, or leave out --weight-parts"
BORROWED_SHARED_EXPERTS = refusal(
    "shared experts that ranks borrow, which vLLM may compute before or after the others,",
    _NOT_BORROWED,
)
BORROWED_SINKS = refusal(
    "attention sinks, which models with experts in MXFP4 have and ranks do not lend,", _NOT_BORROWED
)


def kv_type_refusal(name: str) -> str:
    """Return the sentence about a type of the KV cache."""
    types = ", ".join(KV_TYPES[:-2])
    return refusal(f"KV cache type {name!r}", f"use --kv-cache-dtype {types} or fp8")


MIXED_KV = refusal("layers with KV of another type", "leave out --kv-cache-dtype-skip-layers")


def parallel_refusal(name: str) -> str:
    """Return the sentence about one of vLLM's parallel sizes."""
    return (
        f"leave out {name}: aileron decides the parallel size at run time; use --ranks and "
        "--layout."
    )


@dataclass(frozen=True, slots=True)
class Holding:
    """How ranks hold the weights: in how many parts, and which layers are in parts."""

    widest: int = 1
    """The number of ranks in the widest group."""
    parts: int = 1
    borrow: str = "ffn"
    """`none`, `ffn` or `all`, as in the configuration."""

    @property
    def is_unviewed(self) -> bool:
        """Whether each rank holds what vLLM's own rank holds in tp, so that nobody views it.

        Ranks that form no wide group hold all weights as vLLM does.
        """
        return self.parts == self.widest and (self.widest == 1 or self.borrow != "ffn")


def _or_parts(instead: str, widest: int) -> str:
    """Add to a remedy that ranks can hold all weights, or parts, as vLLM makes them."""
    return (
        f"use --weight-parts {widest} with --borrow all or none, or --widths 1, where no rank "
        f"views weights, or {instead}"
    )


def cpu_quantization_refusal(name: str, widest: int) -> str:
    """Return the sentence about quantized weights on CPU."""
    return refusal(
        f"quantization {name!r} on CPU, where vLLM's kernels pack weights so that they cannot be "
        "viewed,",
        _or_parts("serve a bf16, fp16 or fp32 checkpoint there", widest),
    )


def packed_refusal(name: str, widest: int) -> str:
    """Return the sentence about a quantization whose weights are no plain matrices."""
    return refusal(
        f"quantization {name!r}, whose packed weights cannot be viewed per rank,",
        _or_parts(_INSTEAD_OF_QUANTIZED, widest),
    )


def quantized_kv_refusal(name: str) -> str:
    """Return the sentence about a checkpoint with scales for a quantized KV cache."""
    return refusal(
        f"quantization {name!r} with a quantized KV cache of another kind than fp8 with one scale",
        f"take it out of config.json or {_INSTEAD_OF_QUANTIZED}",
    )


def other_scales_refusal(name: str, widest: int) -> str:
    """Return the sentence about quantized weights with other scales or types."""
    return refusal(
        f"quantization {name!r} with other weights than fp8 of per-tensor, per-channel or block "
        "scales,",
        _or_parts(_INSTEAD_OF_QUANTIZED, widest),
    )


def refusals(
    config: Mapping[str, Any],
    options: Sequence[GivenOption],
    device: str,
    widths: Sequence[int] = (1,),
    holding: Holding | None = None,
) -> Iterator[str]:
    """Yield a sentence for each reason not to serve the model of this config.json.

    Without `holding`, every rank holds all weights.
    """
    config = {**config, **overrides_of(options)}
    yield from option_refusals(options)
    names = architectures(config)
    if names and is_pooling(names[0]) and last_value(options, "--runner") in (None, "auto"):
        yield POOLING
    if is_multimodal(config) and not is_on(options, TEXT_ONLY):
        yield MULTIMODAL
    yield from _layer_refusals(config, widths)
    for name in FIELDS:
        if config.get(name) and not isinstance(config[name], Mapping):
            yield f"{name} in config.json is no object: get the file again."
    holding = holding or Holding(widest=max(widths, default=1))
    stored = stored_quantization(config, last_value(options, "--quantization"))
    if stored is not None:
        yield from _quantization_refusals(config, stored, device, holding)
    yield from _width_refusals(config, widths)
    borrows = holding.parts > 1 and holding.borrow != "none"
    if borrows and any(config.get(name) for name in _SHARED_EXPERTS):
        yield BORROWED_SHARED_EXPERTS
    if borrows and stored is not None and stored.method in MXFP4_QUANTIZATIONS:
        yield BORROWED_SINKS


def option_refusals(options: Sequence[GivenOption]) -> Iterator[str]:
    """Yield a sentence for each option that no model can be served with."""
    names = {option.name for option in options}
    for name in _PARALLEL_OPTIONS:
        if name in names:
            yield parallel_refusal(name)
    if is_on(options, "--enable-lora"):
        yield LORA
    if last_value(options, "--speculative-config") is not None:
        yield SPECULATION
    if last_value(options, "--kv-transfer-config") is not None:
        yield KV_CONNECTORS
    if (last_value(options, "--kv-cache-dtype") or "auto") not in KV_TYPES:
        yield kv_type_refusal(last_value(options, "--kv-cache-dtype") or "")
    if "--kv-cache-dtype-skip-layers" in names:
        yield MIXED_KV
    if last_value(options, "--runner") == "pooling":
        yield POOLING


def overrides_of(options: Sequence[GivenOption]) -> dict[str, Any]:
    """Return what the user replaces in config.json; vLLM refuses anything but an object."""
    try:
        value = json.loads(last_value(options, "--hf-overrides") or "{}")
    except ValueError:
        return {}
    overrides = value if isinstance(value, dict) else {}
    for option in options:
        name, _, rest = option.name.partition(".")
        if name == "--hf-overrides" and rest and "." not in rest:
            overrides[rest] = _parsed(last_value(options, option.name))
    return overrides


def _parsed(text: str | None) -> Any:
    """Return the JSON value of a text, or the text."""
    try:
        return json.loads(text or "null")
    except ValueError:
        return text


def _layer_refusals(config: Mapping[str, Any], widths: Sequence[int]) -> Iterator[str]:
    """Yield what the layers that a config.json describes lack; the family does not matter."""
    if config.get("is_encoder_decoder"):
        yield ENCODERS
    elif config.get("kv_lora_rank"):
        yield LATENT_ATTENTION
    elif _has_recurrent_layers(config):
        yield RECURRENT
    elif _has_chunks(config):
        yield CHUNKED_ATTENTION
    elif _has_alibi(config) and max(widths, default=1) > 1:
        yield ALIBI


def is_pooling(architecture: str) -> bool:
    """Return whether vLLM's class of this name makes vectors or scores, not text.

    vLLM decides by the same endings where `--runner` is auto; a test compares all its classes.
    """
    return architecture.endswith(_POOLING) and not architecture.endswith(_GENERATING)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Return whether a model reads more than text."""
    return any(key in config for key in ("vision_config", "audio_config", "thinker_config"))


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the names of a model's architectures."""
    named = config.get("architectures")
    return [str(each) for each in named] if isinstance(named, list) else []


def _has_recurrent_layers(config: Mapping[str, Any]) -> bool:
    """Return whether some layers keep a state instead of keys and values."""
    types = [
        str(each)
        for name in _LAYER_TYPES
        if isinstance(found := config.get(name), list)
        for each in found
    ]
    return any("attention" not in each or "linear" in each for each in types) or any(
        config[name] and str(name).startswith(_RECURRENT) for name in config
    )


def _has_chunks(config: Mapping[str, Any]) -> bool:
    """Return whether a layer attends to the chunk of a token alone, in a context of several."""
    chunk, longest = config.get("attention_chunk_size"), config.get("max_position_embeddings")
    if not isinstance(chunk, int):
        return False
    return not isinstance(longest, int) or chunk < longest


def _has_alibi(config: Mapping[str, Any]) -> bool:
    attention = object_of(config.get("attn_config"))
    named = config.get("position_embedding_type") or config.get("position_embedding")
    return bool(config.get("alibi") or attention.get("alibi") or str(named).lower() == "alibi")


def _quantization_refusals(
    config: Mapping[str, Any], stored: StoredQuantization, device: str, holding: Holding
) -> Iterator[str]:
    name = stored.method
    if stored.kv == "other":
        yield quantized_kv_refusal(name)
    elif holding.is_unviewed or not stored.has_weights:
        return
    elif device == "cpu":
        yield cpu_quantization_refusal(name, holding.widest)
    elif name in MXFP4_QUANTIZATIONS:
        return  # Of experts alone: their layers are checked when ranks have them.
    elif name not in (*FP8_QUANTIZATIONS, *ONLINE_FP8):
        yield packed_refusal(name, holding.widest)
    elif not _are_plain_fp8(stored):
        yield other_scales_refusal(name, holding.widest)
    else:
        yield from _block_refusals(config, stored, holding.widest)


def _block_refusals(
    config: Mapping[str, Any], stored: StoredQuantization, widest: int
) -> Iterator[str]:
    try:
        cut = cut_by(config, stored, widest)
    except ValueError as error:
        yield f"the quantization in config.json: {error}. Get the file again."
        return
    if cut is not None:
        yield f"{cut}: use smaller --widths, or serve a bf16 checkpoint."


def _are_plain_fp8(stored: StoredQuantization) -> bool:
    """Return whether stored weights are fp8 with scales that are viewed."""
    if stored.method == MODELOPT:
        # If only the user names it, vLLM looks the algorithm up.
        return stored.algorithm == MODELOPT_FP8 or not stored.fields
    return all(map(_is_plain_fp8, stored.groups.values()))


def _is_plain_fp8(group: object) -> bool:
    """Return whether a group of compressed-tensors is fp8 times fp8 with scales that are viewed."""
    parts = object_of(group)
    weights, inputs = object_of(parts.get("weights")), object_of(parts.get("input_activations"))
    if not weights or not inputs:
        return False
    are_fp8 = all(
        each.get("num_bits") == 8 and each.get("type") == "float" for each in (weights, inputs)
    )
    return are_fp8 and weights.get("strategy") in ("tensor", "channel", "block")


def _width_refusals(config: Mapping[str, Any], widths: Sequence[int]) -> Iterator[str]:
    width = max(widths, default=1)
    heads = config.get("num_attention_heads")
    kv_heads = next((config[name] for name in _KV_HEADS if config.get(name)), None)
    if isinstance(heads, int) and isinstance(kv_heads, int):
        try:
            HeadExchange(heads, kv_heads, width)
        except ExchangeError as error:
            yield f"{error} Use smaller --widths."
    if (sentence := inner_refusal(config.get("intermediate_size"), width)) is not None:
        yield sentence
    experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
    if (sentence := experts_refusal(experts, width)) is not None:
        yield sentence


def inner_refusal(size: object, width: int) -> str | None:
    """Return the sentence about an intermediate size that a width does not divide."""
    if not isinstance(size, int) or size % width == 0:
        return None
    return f"width {width} does not divide the intermediate size {size}: use smaller --widths."


def experts_refusal(count: object, width: int) -> str | None:
    """Return the sentence about experts that a width does not divide."""
    if not isinstance(count, int) or count % width == 0:
        return None
    return f"width {width} does not divide the model's {count} experts: use smaller --widths."
