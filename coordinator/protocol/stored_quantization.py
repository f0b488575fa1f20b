"""What a config.json says of quantized weights and of a quantized KV cache, as vLLM reads it. Pure.

vLLM asks for KV's type by the method: others than compressed-tensors and ModelOpt ignore a scheme.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

COMPRESSED = "compressed-tensors"
"""The format of llm-compressor's checkpoints."""
MODELOPT, MODELOPT_FP8 = "modelopt", "FP8"
"""ModelOpt's fp8 checkpoints, and its name of those with per-tensor scales."""
MXFP4_QUANTIZATIONS = ("mxfp4", "gpt_oss_mxfp4")
"""vLLM's names of checkpoints whose experts alone are of four bits."""
FIELDS = ("quantization_config", "compression_config")
"""Where config.json describes quantized weights."""

_MODELOPT_METHODS = {
    MODELOPT_FP8: MODELOPT,
    "FP8_PER_CHANNEL_PER_TOKEN": MODELOPT,
    "FP8_PB_WO": MODELOPT,
    "NVFP4": "modelopt_fp4",
}
"""ModelOpt's algorithm -> vLLM's method, where a checkpoint names the former alone."""
_MODELOPT_KV: dict[str, "KvKind"] = {"fp8": "fp8", "nvfp4": "other"}

KvKind = Literal["", "fp8", "other"]
"""How a checkpoint's KV is quantized: not at all, fp8 with one scale for K and V each, or else."""


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """The quantization of a checkpoint, or the one that the user asks for."""

    method: str
    """vLLM's name; it is not empty."""
    fields: Mapping[str, Any]
    """What config.json has; empty if only the user asks for it."""
    groups: Mapping[str, Any]
    """The groups of compressed-tensors, without those of attention, which vLLM drops."""
    algorithm: str
    """ModelOpt's, in capitals."""
    kv: KvKind

    @property
    def has_weights(self) -> bool:
        """Whether weights are quantized, not the KV cache alone."""
        return self.method != COMPRESSED or bool(self.groups)


def stored_quantization(
    config: Mapping[str, Any], given: str | None = None
) -> StoredQuantization | None:
    """Return the quantization of a config.json; `given` is the user's. None: there is none."""
    stored = next((found for name in FIELDS if (found := object_of(config.get(name)))), {})
    inner = object_of(stored.get("quantization"))
    algorithm = str(inner.get("quant_algo") or stored.get("quant_algo") or "").upper()
    method = str(stored.get("quant_method") or "").replace("_tensors", "-tensors")
    producer = object_of(stored.get("producer")).get("name")
    if not method and (producer == MODELOPT or "modelopt_quant_config" in inner):
        method = _MODELOPT_METHODS.get(algorithm, "")
    method = method or given or ""
    if stored and not method and "config_groups" in stored:
        method = COMPRESSED
    if not method or method.lower() == "none":
        return None
    groups = {
        name: group
        for name, group in object_of(stored.get("config_groups")).items()
        if not _is_of_attention(group)
    }
    return StoredQuantization(method, stored, groups, algorithm, _kv_of(method, stored, inner))


def object_of(value: object) -> Mapping[str, Any]:
    """Return a JSON object as it is, and an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def is_plain_kv(scheme: object) -> bool:
    """Return whether compressed-tensors' scheme of KV is fp8 with one scale for K and V each."""
    read = object_of(scheme)
    is_fp8 = read.get("num_bits") == 8 and read.get("type") == "float"
    is_plain = read.get("strategy") == "tensor" and bool(read.get("symmetric"))
    return is_fp8 and is_plain and not read.get("dynamic")


def _is_of_attention(group: object) -> bool:
    targets = object_of(group).get("targets")
    if not isinstance(targets, list) or len(targets) != 1:
        return False
    return str(targets[0]).endswith("Attention")


def _kv_of(method: str, stored: Mapping[str, Any], inner: Mapping[str, Any]) -> KvKind:
    if method == COMPRESSED:
        scheme = stored.get("kv_cache_scheme")
        return "" if not scheme else "fp8" if is_plain_kv(scheme) else "other"
    if not method.startswith(MODELOPT):
        return ""
    named = (each.get("kv_cache_scheme") for each in (inner, stored))
    scheme = next(filter(None, named), None)
    algorithm = inner.get("kv_cache_quant_algo") or stored.get("kv_cache_quant_algo")
    if not isinstance(scheme, Mapping):
        return _MODELOPT_KV.get(str(scheme or algorithm or "").lower(), "")
    if scheme.get("type") != "float":
        return ""
    if scheme.get("num_bits") == 8 and scheme.get("dynamic") is False:
        return "fp8"
    return "other" if scheme.get("num_bits") == 4 else ""
