"""What config.json says of quantization: our reading is vLLM's, over a table of configurations."""

import copy
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsKVCacheMethod,
)
from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

from coordinator.protocol.stored_quantization import stored_quantization

FP8 = {"num_bits": 8, "type": "float"}
KV = {**FP8, "strategy": "tensor", "symmetric": True, "dynamic": False}
LINEAR = {
    "targets": ["Linear"],
    "weights": {**FP8, "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {**FP8, "strategy": "token", "symmetric": True, "dynamic": True},
}
ATTENTION = {"targets": ["Qwen3Attention"], "input_activations": KV}
TYPES = {"fp8_e4m3": "fp8", "nvfp4": "other", "auto": "", None: ""}
"""vLLM's type of KV -> ours."""


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_cache_scheme": {**FP8, "dynamic": False}},
        {"kv_cache_scheme": {**FP8, "dynamic": True}},
        {"kv_cache_scheme": FP8},
        {"kv_cache_scheme": {"num_bits": 4, "type": "float", "dynamic": False}},
        {"kv_cache_scheme": {"num_bits": 8, "type": "int", "dynamic": False}},
        *({"kv_cache_quant_algo": name} for name in ("FP8", "fp8", "NVFP4", "INT8", "none")),
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}},
        {"quantization": {"quant_algo": "FP8"}, "kv_cache_quant_algo": "NVFP4"},
    ],
)
def test_modelopt_s_kv_has_vllm_s_type(fields: dict[str, Any]) -> None:
    stored = {"quant_method": "modelopt", "quant_algo": "FP8", **fields}
    found = stored_quantization({"quantization_config": stored})
    assert found is not None
    assert found.kv == TYPES[get_kv_cache_quant_algo_string(stored)]


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq"])
def test_other_methods_have_no_type_of_kv(method: str) -> None:
    stored = {"quant_method": method, "kv_cache_scheme": KV}
    found = stored_quantization({"quantization_config": stored})
    assert found is not None
    assert found.kv == TYPES[get_kv_cache_quant_algo_string(stored)] == ""


@pytest.mark.parametrize(
    "scheme",
    [
        KV,
        {**KV, "symmetric": False},
        {**KV, "type": "int"},
        {**KV, "num_bits": 4},
        {**KV, "strategy": "channel"},
        {**FP8, "symmetric": True},
    ],
)
def test_schemes_that_vllm_refuses_are_of_another_kind(scheme: dict[str, Any]) -> None:
    stored = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    found = stored_quantization({"quantization_config": stored})
    assert found is not None
    try:
        CompressedTensorsKVCacheMethod.validate_kv_cache_scheme(scheme)
    except (NotImplementedError, ValueError):
        assert found.kv == "other"
    else:
        assert found.kv == "fp8"


@pytest.mark.parametrize(
    ("groups", "has_weights"),
    [
        ({}, False),
        ({"0": ATTENTION}, False),
        ({"0": LINEAR}, True),
        ({"0": LINEAR, "1": ATTENTION}, True),
    ],
)
def test_groups_of_attention_are_dropped(groups: dict[str, Any], has_weights: bool) -> None:
    stored = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
    }
    theirs = CompressedTensorsConfig.from_config(copy.deepcopy(stored))
    found = stored_quantization({"quantization_config": stored})
    assert found is not None
    assert found.has_weights == bool(theirs.target_scheme_map) == has_weights
