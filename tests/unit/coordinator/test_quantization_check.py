"""Quantized models that ranks serve or refuse, by config.json alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.protocol.config import ConfigError
from coordinator.protocol.engine_options import read_options
from coordinator.protocol.held_weights import ElementBytes, element_bytes
from coordinator.protocol.model_check import Memory
from coordinator.protocol.model_files import find_model
from tests.harness.coordinator.model_folders import change, check
from worker.demo import MODEL_DIR

FP8 = {"num_bits": 8, "type": "float"}
KV = {**FP8, "strategy": "tensor", "symmetric": True, "dynamic": False}
CHANNELS = {
    "targets": ["Linear"],
    "weights": {**FP8, "strategy": "channel"},
    "input_activations": {**FP8, "strategy": "token"},
}
ATTENTION = {"targets": ["LlamaAttention"], "input_activations": KV}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {"0": CHANNELS},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
OLD_MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.15.1"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
}
"""What hf_quant_config.json has."""
OTHER_KV = (
    {**KV, "strategy": "attn_head"},
    {**KV, "dynamic": True},
    {**KV, "symmetric": False},
    {**KV, "type": "int"},
    {**KV, "num_bits": 4},
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
        ({"quant_method": "fp8", "weight_block_size": [1]}, "not the rows and columns of a block"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "not the rows and columns"),
        *(
            ({**COMPRESSED, "kv_cache_scheme": scheme}, "quantized KV cache of another kind")
            for scheme in OTHER_KV
        ),
        ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, "quantized KV cache of another kind"),
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


@pytest.mark.parametrize(
    ("quantization", "kv_bytes"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 2),
        # vLLM does not read it there.
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, 2),
        (COMPRESSED, 2),
        ({**COMPRESSED, "kv_cache_scheme": KV}, 1),
        ({**COMPRESSED, "config_groups": {"0": CHANNELS, "1": ATTENTION}}, 2),
        (MODELOPT, 2),
        ({**MODELOPT, "kv_cache_scheme": {**FP8, "dynamic": False}}, 1),
        ({**MODELOPT, "kv_cache_scheme": FP8}, 2),
        ({**MODELOPT, "kv_cache_quant_algo": "FP8"}, 1),
        (OLD_MODELOPT, 1),
    ],
)
def test_a_quantization_that_ranks_serve(
    model: Path, quantization: dict[str, Any], kv_bytes: int
) -> None:
    change(model, quantization_config=quantization)
    check(model, device="cuda")
    found = element_bytes({"quantization_config": quantization})
    assert found == ElementBytes(1, 2, kv_bytes, 1)


def test_experts_in_mxfp4_are_served(model: Path) -> None:
    """Their layers alone are quantized."""
    change(model, quantization_config={"quant_method": "mxfp4"})
    check(model, device="cuda")
    check(model, device="cuda", ranks=2, widths=[1, 2], layout="tp2")
    with pytest.raises(ConfigError, match="quantization 'mxfp4' on CPU"):
        check(model)
    halves: dict[str, Any] = {"device": "cuda", "ranks": 2, "widths": [1, 2], "weight_parts": 2}
    check(model, **halves, borrow="none", layout="tp2")
    for borrow in ("ffn", "all"):
        with pytest.raises(ConfigError, match=r"attention sinks, .* do not lend.*--borrow none"):
            check(model, **halves, borrow=borrow, layout="dp2")


def test_older_checkpoints_keep_it_in_a_file_of_its_own(model: Path) -> None:
    (model / "hf_quant_config.json").write_text(json.dumps(OLD_MODELOPT))
    for words in ((), ("--quantization", "modelopt")):
        check(model, *words, device="cuda")
        with pytest.raises(ConfigError, match="quantization 'modelopt' on CPU"):
            check(model, *words)
    found = find_model(str(model), {})
    assert found.config is not None
    assert element_bytes(found.config) == ElementBytes(1, 2, 1, 1)
    change(model, quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match="'awq'"):
        check(model, device="cuda")


def test_padding_of_experts_in_mxfp4_counts_as_weights(model: Path) -> None:
    """Marlin makes an inner size of 160 one of 256, and a hidden size of 320 one of 512."""
    sizes = {"hidden_size": 320, "intermediate_size": 160, "num_local_experts": 64}
    change(model, model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"}, **sizes)
    size = (model / "model.safetensors").stat().st_size
    whole = ("--gpu-memory-utilization", "1")
    with pytest.raises(ConfigError, match=r"its weights take .* in a device"):
        check(model, *whole, device="cuda", memory=Memory(int(1.5 * size), "its GPU"))
    check(model, *whole, device="cuda", memory=Memory(3 * size, "its GPU"))


PACKED: tuple[dict[str, Any], ...] = (
    {"quant_method": "awq"},
    {"quant_method": "gptq"},
    {"quant_method": "nvfp4"},
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("packed", PACKED, ids=lambda each: str(each["quant_method"]))
def test_packed_weights_are_served_where_no_rank_views_them(
    model: Path, packed: dict[str, Any], device: str
) -> None:
    change(model, quantization_config=packed)
    halves: dict[str, Any] = {"device": device, "ranks": 2, "widths": [1, 2], "weight_parts": 2}
    for borrow, layout in (("all", "dp2"), ("none", "tp2")):
        check(model, **halves, borrow=borrow, layout=layout)
    with pytest.raises(
        ConfigError, match="--weight-parts 2 with --borrow all or none, or --widths 1"
    ):
        check(model, **halves, borrow="ffn", layout="dp2")
    wide: dict[str, Any] = {"device": device, "ranks": 4, "widths": [1, 2, 4], "layout": "dp4"}
    some: dict[str, Any] = {"weight_parts": 2, "borrow": "all"}
    for more in ({}, some):
        with pytest.raises(
            ConfigError, match="--weight-parts 4 with --borrow all or none, or --widths 1"
        ):
            check(model, **wide, **more)
    for ranks in (1, 4):
        check(model, device=device, ranks=ranks, widths=[1], layout=f"dp{ranks}")


def in_blocks(rows: int, columns: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": [rows, columns], **more}


COMPRESSED_BLOCKS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "0": {
            "targets": ["Linear"],
            "weights": {**FP8, "strategy": "block", "block_structure": [128, 128]},
            "input_activations": {**FP8, "strategy": "group", "dynamic": True},
        }
    },
}
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024}
"""With heads of 128 numbers, shares of up to four ranks are whole blocks of 128."""


@pytest.mark.parametrize(
    ("quantization", "sizes", "cut"),
    [
        (in_blocks(128, 128), {}, None),
        (COMPRESSED_BLOCKS, {}, None),
        (in_blocks(256, 128), {}, "128 rows of keys"),
        (in_blocks(128, 512), {}, "256 rows of queries"),
        (in_blocks(128, 128), {"intermediate_size": 1280}, "320 inner features"),
        (in_blocks(128, 128), {"head_dim": 64}, "64 rows of keys"),
        (COMPRESSED_BLOCKS, {"head_dim": 64}, "64 rows of keys"),
        # Experts are whole in every rank.
        (in_blocks(128, 128), {"intermediate_size": 1280, "num_experts": 8}, None),
        # Perhaps these are not quantized: the layers tell.
        (in_blocks(128, 128, modules_to_not_convert=["k_proj"]), {"head_dim": 64}, None),
        (
            in_blocks(128, 128, modules_to_not_convert=["lm_head"]),
            {"head_dim": 64},
            "64 rows of keys",
        ),
        ({**COMPRESSED_BLOCKS, "ignore": ["re:.*attn"]}, {"head_dim": 64}, None),
    ],
)
def test_blocks_are_viewed_where_no_border_of_a_rank_cuts_them(
    model: Path, quantization: dict[str, Any], sizes: dict[str, Any], cut: str | None
) -> None:
    change(model, **{"head_dim": 128, **SIZES, **sizes}, quantization_config=quantization)
    wide: dict[str, Any] = {"device": "cuda", "ranks": 4, "widths": [1, 2, 4], "layout": "dp4"}
    check(model, device="cuda", ranks=4, widths=[1], layout="dp4")
    if cut is None:
        check(model, **wide)
        return
    with pytest.raises(ConfigError, match=f"width 4 gives each rank {cut} of a layer, which cuts"):
        check(model, **wide)
    change(model, num_attention_heads=6, num_key_value_heads=2)
    with pytest.raises(ConfigError) as refused:
        check(model, **wide)
    assert "query heads" in str(refused.value)
    assert "cuts" not in str(refused.value)


def test_blocks_that_vllm_makes_are_cut_as_well(model: Path) -> None:
    words = "--quantization", "fp8_per_block"
    cell: dict[str, Any] = {"device": "cuda", "ranks": 2, "layout": "dp2"}
    with pytest.raises(ConfigError, match="64 rows of keys of a layer, which cuts blocks of 128"):
        check(model, *words, **cell, widths=[1, 2])
    check(model, *words, **cell, widths=[1])


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("value", [["fp8"], "fp8", 8, 0.5, True])
def test_a_quantization_that_is_no_object(model: Path, name: str, value: Any) -> None:
    change(model, **{name: value})
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=f"{name} in config.json is no object"):
            check(model, device=device)


@pytest.mark.parametrize("groups", [{}, {"0": ATTENTION}])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kv_alone_may_be_quantized(model: Path, device: str, groups: dict[str, Any]) -> None:
    """Weights are as in other checkpoints, and take as much memory."""
    alone = {**COMPRESSED, "config_groups": groups, "kv_cache_scheme": KV}
    change(model, quantization_config=alone)
    check(model, device=device)
    assert element_bytes({"quantization_config": alone}) == ElementBytes(2, 2, 1, 2)
    given = read_options(["--kv-cache-dtype", "bfloat16"])[0]
    assert element_bytes({"quantization_config": alone}, given).kv == 2
