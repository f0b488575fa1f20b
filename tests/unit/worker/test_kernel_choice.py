"""Kernels of quantized weights that ranks choose where vLLM's own choice could not be viewed."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from coordinator.protocol.model_support import Holding
from worker.engine.config import choose_kernels

WIDE = Holding(widest=2)
ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)
BLOCKS = {"weight_block_size": [128, 128]}
TARGETS = {"args": SimpleNamespace(targets={"Linear": "fp8_per_block"})}
"""Of layers that the user names, quantized while they are loaded."""
TENSORS = {"weight_block_size": None}


def chosen(
    name: str,
    fields: dict[str, Any],
    holding: Holding = WIDE,
    capability: tuple[int, int] | None = HOPPER,
    *,
    is_moe: bool = False,
    given: str = "auto",
) -> tuple[str, str]:
    """The kernels of linear layers and of experts."""
    quant = SimpleNamespace(get_name=partial(str, name), **fields)
    config: Any = SimpleNamespace(
        quant_config=quant,
        model_config=SimpleNamespace(is_moe=is_moe),
        kernel_config=SimpleNamespace(moe_backend=given, linear_backend=given),
    )
    choose_kernels(config, holding, capability)
    return config.kernel_config.linear_backend, config.kernel_config.moe_backend


@pytest.mark.parametrize(
    ("name", "fields", "wanted"),
    [
        ("fp8", BLOCKS, "triton"),
        ("fp8", TENSORS, "triton"),
        ("gpt_oss_mxfp4", {}, "marlin"),
        ("mxfp4", {}, "marlin"),
        ("awq", {}, "auto"),
        ("modelopt", {"quant_method": "FP8_PB_WO"}, "auto"),
    ],
)
def test_experts_are_kept_apart(name: str, fields: dict[str, Any], wanted: str) -> None:
    assert chosen(name, fields, is_moe=True) == ("auto", wanted)
    assert chosen(name, fields, is_moe=False) == ("auto", "auto")
    assert chosen(name, fields, is_moe=True, given="deep_gemm")[1] == "deep_gemm"


@pytest.mark.parametrize(
    ("parts", "borrow", "wanted"),
    [(1, "ffn", "triton"), (2, "ffn", "triton"), (2, "all", "triton"), (2, "none", "auto")],
)
def test_experts_that_nobody_views_or_borrows_have_vllms_kernel(
    parts: int, borrow: str, wanted: str
) -> None:
    assert chosen("fp8", TENSORS, Holding(2, parts, borrow), is_moe=True)[1] == wanted


@pytest.mark.parametrize(
    ("capability", "wanted"),
    [(HOPPER, "auto"), (BLACKWELL, "cutlass"), (ADA, "triton"), (None, "triton")],
)
def test_blocks_are_left_as_they_are_on_any_gpu(
    capability: tuple[int, int] | None, wanted: str
) -> None:
    assert chosen("fp8", BLOCKS, WIDE, capability)[0] == wanted
    assert chosen("online", TARGETS, WIDE, capability)[0] == wanted
    assert chosen("fp8", TENSORS, WIDE, capability)[0] == "auto"
    unviewed = Holding(2, 2, "none")
    assert chosen("fp8", BLOCKS, unviewed, capability)[0] == "auto"
