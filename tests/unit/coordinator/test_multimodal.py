"""Multimodal models: their text is served alone where torchvision is there."""

import shutil
from pathlib import Path

import pytest

from coordinator.protocol import model_check
from coordinator.protocol.config import ConfigError, check_config
from coordinator.protocol.model_check import check_model
from coordinator.protocol.model_files import ask_nobody
from tests.harness.coordinator.model_folders import change
from worker.demo import MODEL_DIR


def check(model: Path, *engine_args: str) -> None:
    """Judge the model for two CPU ranks."""
    data = {"model": {"path": str(model), "engine_args": engine_args}, "cell": {}}
    check_model(check_config(data), {"HF_HOME": "/nowhere"}, fetch=ask_nobody)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))


def test_the_text_of_a_multimodal_model_is_served_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_check, "find_spec", lambda _: True)
    change(model, architectures=["X"], vision_config={})
    with pytest.raises(ConfigError, match="add --language-model-only to serve their text alone"):
        check(model)
    with pytest.raises(ConfigError, match="add --language-model-only"):
        check(model, "--language-model-only", "--no-language-model-only")
    check(model, "--language-model-only")
    # Its text is refused for what that has.
    change(model, text_config={"intermediate_size": 705})
    with pytest.raises(ConfigError, match="intermediate size 705"):
        check(model, "--language-model-only")
    change(model, text_config={"kv_lora_rank": 512})
    with pytest.raises(ConfigError, match="latent attention"):
        check(model, "--language-model-only")


def test_a_multimodal_model_without_torchvision_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_check, "find_spec", lambda _: None)
    check(model)
    change(model, architectures=["X"], vision_config={}, text_config={})
    with pytest.raises(ConfigError, match="install the build of torchvision"):
        check(model, "--language-model-only")
