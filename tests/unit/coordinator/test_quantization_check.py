"""Quantized models that ranks serve or refuse, by config.json alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.protocol.config import ConfigError
from tests.harness.coordinator.model_folders import change, check
from worker.demo import MODEL_DIR

FP8 = {"num_bits": 8, "type": "float"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))


@pytest.mark.parametrize(
    ("quantization", "sentence"),
    [
        ({"quant_method": "awq"}, "'awq', whose packed weights"),
        ({"quant_method": "fp8", "weight_block_size": [1]}, "block sc"),
        ({"quant_method": "fp8", "kv_cache_scheme": FP8}, "quantized KV cache"),
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
    with pytest.raises(ConfigError, match="quantized KV cache"):
        check(model, **halves, borrow="all")


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("value", [["fp8"], "fp8", 8, 0.5, True])
def test_a_quantization_that_is_no_object(model: Path, name: str, value: Any) -> None:
    change(model, **{name: value})
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=f"{name} in config.json is no object"):
            check(model, device=device)
