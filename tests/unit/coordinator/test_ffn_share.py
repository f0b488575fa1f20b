"""The share of feed-forward layers in a model, from its config.json."""

import json
from typing import Any

import pytest

from coordinator.cli.launch import DEMO_MODEL
from coordinator.protocol.ffn_share import ffn_share, whole_share
from tests.harness.coordinator.published_models import QWEN3_30B_A3B, QWEN3_32B


@pytest.mark.parametrize(
    ("config", "share"), [(QWEN3_32B, 0.768), (QWEN3_30B_A3B, 0.950), ({}, None)]
)
def test_published_shapes(config: dict[str, Any], share: float | None) -> None:
    found = ffn_share(config)
    assert found == (None if share is None else pytest.approx(share, abs=0.002))


def test_the_demo_model_as_its_file_says() -> None:
    """2.70 million of 4.73 million elements; norms are left out."""
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    ffn, attention, embeddings = 5 * 3 * 256 * 704, 5 * 2 * 256 * 32 * 12, 4_096 * 256
    assert ffn_share(config) == pytest.approx(ffn / (ffn + attention + embeddings))


def test_an_odd_config_is_unknown() -> None:
    assert ffn_share({**QWEN3_32B, "hidden_size": "wide"}) is None
    assert ffn_share({**QWEN3_32B, "num_attention_heads": 0, "head_dim": None}) is None


def test_whole_layers_are_a_share_of_all() -> None:
    assert whole_share(QWEN3_32B, 16) == pytest.approx(0.25)
    assert whole_share(QWEN3_32B, 80) == 1.0
    assert whole_share({}, 16) == 0.0
