"""Experts, fp8 KV and block-scaled fp8 on two GPUs compute what static vLLM does in every layout.

Tasks that move over switches do so as well.

Tiny random checkpoints in bf16. Needs two NVIDIA GPUs and vLLM's CUDA build (fp8: compute
capability 8.9 or more): `python -m pytest -m gpu tests/gpu/test_models.py -s` prints the errors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.harness.vllm.cuda_checkpoint import (
    LAYOUTS,
    Served,
    check_loss,
    check_moves,
    serving,
)
from tests.harness.vllm.quantized_models import CONFIGS as QUANTIZED
from tests.harness.vllm.quantized_models import write_quantized
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Kind:
    """A model, and the options with which it is served."""

    model: str
    kv_cache_dtype: str = "auto"
    limits: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "qwen3-moe": Kind("qwen3-moe-a3b"),
    "mixtral": Kind("mixtral-8x7b"),
    "fp8-kv": Kind("demo", kv_cache_dtype="fp8"),
    "kv-scales": Kind("kv-scales"),
    "fp8-block": Kind("fp8-block"),
    "fp8-block-moe": Kind("fp8-block-moe"),
    "qwen3-moe-borrowed": Kind("qwen3-moe-a3b", limits={"weight_parts": 2, "borrow": "ffn"}),
}


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    is_quantized = kind.model in QUANTIZED
    model = write_quantized(folder, kind.model)[0] if is_quantized else model_of(kind.model, folder)
    kv = kind.kv_cache_dtype
    with serving(folder, request.param, model, limits=kind.limits, kv_cache_dtype=kv) as up:
        yield up


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_is_that_of_static_vllm(served: Served, layout: str) -> None:
    check_loss(served, layout)


def test_tasks_keep_their_kv_over_switches(served: Served) -> None:
    check_moves(served)
