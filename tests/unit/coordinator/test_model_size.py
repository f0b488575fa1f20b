"""The sizes of models by their config.json alone, compared with transformers and with papers."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE

from coordinator.cli.launch import DEMO_MODEL
from coordinator.protocol.model_size import VOCABULARY_MULTIPLE, model_size
from tests.harness.coordinator.published_models import QWEN3_30B_A3B, QWEN3_32B
from tests.harness.vllm.families import FAMILIES, SIZES, Family
from tests.harness.vllm.plain_models import build_plain


@pytest.mark.parametrize("family", FAMILIES, ids=[each.slug for each in FAMILIES])
def test_every_family_is_counted_as_transformers_builds_it(family: Family) -> None:
    """Biases are left out, and weigh more in tiny models: half a percent."""
    given = {**SIZES, **family.fields}
    fields = {name: value for name, value in given.items() if value is not ...}
    config = AutoConfig.for_model(family.kind, **fields)
    with torch.device("meta"):
        model = build_plain(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    size = model_size(json.loads(config.to_json_string(use_diff=True)))
    assert size is not None
    assert size.elements == pytest.approx(built, rel=0.005)


@pytest.mark.parametrize(
    ("config", "billions", "ffn"), [(QWEN3_32B, 32.8, 0.768), (QWEN3_30B_A3B, 30.5, 0.950)]
)
def test_published_shapes(config: dict[str, Any], billions: float, ffn: float) -> None:
    size = model_size(config)
    assert size is not None
    assert size.elements / 1e9 == pytest.approx(billions, abs=0.05)
    assert size.feed_forward / size.elements == pytest.approx(ffn, abs=0.002)


def test_the_demo_model_as_its_file_says() -> None:
    """2.70 million of 4.73 million elements are feed-forward layers."""
    size = model_size(json.loads((DEMO_MODEL / "config.json").read_text()))
    assert size is not None
    assert size.feed_forward == 5 * 3 * 256 * 704
    assert size.attention == 5 * 2 * 256 * 32 * 12
    assert size.embeddings == 4_096 * 256


def test_rows_are_padded_as_vllm_pads_them() -> None:
    assert VOCABULARY_MULTIPLE == DEFAULT_VOCAB_PADDING_SIZE
    size = model_size({**QWEN3_32B, "vocab_size": 151_937})
    assert size is not None
    assert size.rows == 152_000


@pytest.mark.parametrize(
    "odd",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 0, "head_dim": None},
        {"vocab_size": None},
        {"num_hidden_layers": -1},
        {"intermediate_size": float("inf")},
    ],
)
def test_an_odd_config_is_unknown(odd: dict[str, Any]) -> None:
    assert model_size({**QWEN3_32B, **odd}) is None
    assert model_size({}) is None
