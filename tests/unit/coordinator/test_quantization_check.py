"""Quantized models that ranks serve or refuse, by config.json alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.protocol.config import ConfigError
from coordinator.protocol.engine_options import read_options
from coordinator.protocol.held_weights import ElementBytes, element_bytes
from tests.harness.coordinator.model_folders import change, check
from worker.demo import MODEL_DIR

FP8 = {"num_bits": 8, "type": "float"}


OTHER_KV = (
    {**FP8, "strategy": "attn_head"},
    {**FP8, "dynamic": True},
    {**FP8, "type": "int"},
    {**FP8, "num_bits": 4},
    "fp8",
)
"""Of scales that ranks do not divide, or of other numbers."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))


@pytest.mark.parametrize(
    ("quantization", "sentence"),
    [
        ({"quant_method": "awq"}, "'awq', whose packed weights"),
        ({"quant_method": "fp8", "weight_block_size": [1]}, "block sc"),
        *(
            ({"quant_method": "fp8", "kv_cache_scheme": scheme}, "quantized KV cache of another")
            for scheme in OTHER_KV
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "other weights than fp8"),
        ({"config_groups": {"0": {"weights": {"num_bits": 4}}}}, "other weights than fp8"),
    ],
)
def test_a_quantization_that_ranks_refuse(
    model: Path, quantization: dict[str, Any], sentence: str
) -> None:
    change(model, quantization_config=quantization)
    with pytest.raises(ConfigError, match=sentence) as refused:
        check(model, device="cuda")
    assert str(refused.value).count(str(model)) == 1


CHANNELS = {
    "weights": {**FP8, "strategy": "channel"},
    "input_activations": {**FP8, "strategy": "token"},
}


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"quant_method": "compressed-tensors", "config_groups": {"0": CHANNELS}},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": FP8},
        {"quant_method": "fp8", "kv_cache_scheme": {**FP8, "strategy": "tensor"}},
    ],
)
def test_a_quantization_that_ranks_serve(model: Path, quantization: dict[str, Any]) -> None:
    change(model, quantization_config=quantization)
    check(model, device="cuda")


PACKED: tuple[dict[str, Any], ...] = (
    {"quant_method": "awq"},
    {"quant_method": "gptq"},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("packed", PACKED, ids=lambda each: str(each["quant_method"]))
def test_packed_weights_are_served_where_each_rank_holds_a_part_of_its_own(
    model: Path, packed: dict[str, Any], device: str
) -> None:
    change(model, quantization_config=packed)
    halves: dict[str, Any] = {"device": device, "ranks": 2, "widths": [1, 2], "weight_parts": 2}
    for borrow, layout in (("all", "dp2"), ("none", "tp2")):
        check(model, **halves, borrow=borrow, layout=layout)
    with pytest.raises(ConfigError, match="use --weight-parts 2 --borrow all, where"):
        check(model, **halves, borrow="ffn", layout="dp2")
    wide: dict[str, Any] = {"device": device, "ranks": 4, "widths": [1, 2, 4], "layout": "dp4"}
    some: dict[str, Any] = {"weight_parts": 2, "borrow": "all"}
    for more in ({}, some):
        with pytest.raises(ConfigError, match="use --weight-parts 4 --borrow all, where"):
            check(model, **wide, **more)
    with pytest.raises(ConfigError, match=r"serve (the|a) bf16") as refused:
        check(model, device=device, ranks=1, widths=[1], layout="dp1")
    assert "--weight-parts" not in str(refused.value)
    change(model, quantization_config={**packed, "kv_cache_scheme": FP8})
    check(model, **halves, borrow="all")
    change(model, quantization_config={**packed, "kv_cache_scheme": OTHER_KV[0]})
    with pytest.raises(ConfigError, match="quantized KV cache"):
        check(model, **halves, borrow="all")


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("value", [["fp8"], "fp8", 8, 0.5, True])
def test_a_quantization_that_is_no_object(model: Path, name: str, value: Any) -> None:
    change(model, **{name: value})
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=f"{name} in config.json is no object"):
            check(model, device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kv_alone_may_be_quantized(model: Path, device: str) -> None:
    """Weights are as in other checkpoints, and take as much memory."""
    alone = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": FP8}
    change(model, quantization_config=alone)
    check(model, device=device)
    for fields in (alone, {**alone, "config_groups": None}):
        assert element_bytes({"quantization_config": fields}) == ElementBytes(2, 2, 1)
    given = read_options(["--kv-cache-dtype", "bfloat16"])[0]
    assert element_bytes({"quantization_config": alone}, given).kv == 2
