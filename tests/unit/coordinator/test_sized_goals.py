"""Objectives by the model's size: which apply, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.protocol.config import ConfigError, check_config, dump_config, load_config
from coordinator.protocol.model_size import billions_of
from coordinator.protocol.policy_config import SloTarget
from coordinator.protocol.sized_goals import with_sized_goals
from tests.harness.coordinator.published_models import QWEN3_30B_A3B, QWEN3_32B

SIZES = [
    {"billions_min": 20, "interactive": {"ttft_ms": 450, "tpot_ms": 40}},
    {"billions_min": 300, "interactive": {"ttft_ms": 4_500, "tpot_ms": 80}},
]


def config_of(folder: Path, model: dict[str, Any] | None, sizes: Any = SIZES) -> Any:
    if model is not None:
        (folder / "config.json").write_text(json.dumps(model))
    return check_config({"model": {"path": str(folder)}, "slo": {"sizes": sizes}})


@pytest.mark.parametrize(
    ("model", "billions"), [(QWEN3_32B, 32.8), (QWEN3_30B_A3B, 30.5), ({}, None)]
)
def test_published_sizes(model: dict[str, Any], billions: float | None) -> None:
    assert billions_of(model) == (None if billions is None else pytest.approx(billions, rel=0.01))


def test_the_largest_size_that_a_model_reaches_counts(tmp_path: Path) -> None:
    found = with_sized_goals(config_of(tmp_path, QWEN3_32B)).slo
    assert found.interactive == SloTarget(ttft_ms=450, tpot_ms=40)
    assert found.standard == SloTarget(ttft_ms=2_000, tpot_ms=100)
    assert found.sizes == ()


def test_a_smaller_model_keeps_the_others(tmp_path: Path) -> None:
    small = {**QWEN3_32B, "num_hidden_layers": 16}
    found = with_sized_goals(config_of(tmp_path, small)).slo
    assert found.interactive == SloTarget(ttft_ms=500, tpot_ms=30)


def test_what_other_processes_read_needs_no_size(tmp_path: Path) -> None:
    file = tmp_path / "cell.yaml"
    file.write_text(dump_config(with_sized_goals(config_of(tmp_path, QWEN3_32B))))
    (tmp_path / "config.json").unlink()
    assert with_sized_goals(load_config(file)).slo.interactive.tpot_ms == 40


def test_an_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"leave out slo\.sizes and give its goals"):
        with_sized_goals(config_of(tmp_path, {}))
    with pytest.raises(ConfigError, match="names a billions_min twice"):
        config_of(tmp_path, QWEN3_32B, [SIZES[0], SIZES[0]])
