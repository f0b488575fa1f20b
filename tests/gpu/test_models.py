"""Experts, fp8 KV, forms of fp8 and MXFP4 on two ranks compute what static vLLM does.

They do so in every layout, also for tasks that move over switches.

Tiny random checkpoints in bf16. Needs two NVIDIA GPUs, or one and NCCL 2.30, and vLLM's CUDA build
(fp8: compute capability 8.9 or more): `python -m pytest -m gpu tests/gpu/test_models.py -s` prints
the errors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.harness.vllm.checkpoints import checkpoint
from tests.harness.vllm.cuda_checkpoint import (
    LAYOUTS,
    Served,
    check_loss,
    check_moves,
    serving,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Kind:
    """A model, and the options with which it is served."""

    model: str
    kv_cache_dtype: str = "auto"
    limits: dict[str, Any] = field(default_factory=dict)
    has_experts: bool = False
    moe_backend: str = "auto"
    """Of static vLLM."""
    linear_backend: str = "auto"
    """Of both."""


KINDS = {
    "qwen3-moe": Kind("qwen3-moe-a3b", has_experts=True),
    "mixtral": Kind("mixtral-8x7b", has_experts=True),
    "fp8-kv": Kind("demo", kv_cache_dtype="fp8"),
    "kv-scales": Kind("kv-scales"),
    "fp8-block": Kind("fp8-block"),
    "fp8-block-cutlass": Kind("fp8-block", linear_backend="cutlass"),
    "fp8-channel": Kind("fp8-channel"),
    "fp8-static": Kind("fp8-static"),
    "fp8-modelopt": Kind("fp8-modelopt"),
    "fp8-block-moe": Kind("fp8-block-moe", has_experts=True),
    # vLLM's first choice on Hopper GPUs cannot compile for layers so small; ranks take Marlin.
    "gpt-oss": Kind("gpt-oss", has_experts=True, moe_backend="marlin"),
    "qwen3-moe-borrowed": Kind(
        "qwen3-moe-a3b", limits={"weight_parts": 2, "borrow": "ffn"}, has_experts=True
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    with serving(
        folder,
        request.param,
        checkpoint(kind.model, folder),
        limits=kind.limits,
        kv_cache_dtype=kind.kv_cache_dtype,
        has_experts=kind.has_experts,
        moe_backend=kind.moe_backend,
        linear_backend=kind.linear_backend,
    ) as up:
        yield up


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_is_that_of_static_vllm(served: Served, layout: str) -> None:
    check_loss(served, layout)


def test_tasks_keep_their_kv_over_switches(served: Served) -> None:
    check_moves(served)
