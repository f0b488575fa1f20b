"""Ranges of experts take the tiling that vLLM ships, or its user has tuned, for all experts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.experts import triton_moe

from worker.engine.weights import expert_tilings
from worker.engine.weights.expert_tilings import find_tilings, tune_ranges_of

DEVICE = "NVIDIA_H200"
WHOLE = 128


@pytest.fixture(autouse=True)
def tuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks of a model with 128 experts on an H200."""
    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: DEVICE)
    monkeypatch.setattr(fused_moe, "get_moe_configs", fused_moe.get_moe_configs)
    monkeypatch.setattr(expert_tilings, "_whole_count", 0)
    tune_ranges_of(WHOLE)
    for each in (expert_tilings._find, expert_tilings._tuned_count):
        each.cache_clear()
    yield
    for each in (expert_tilings._find, expert_tilings._tuned_count):
        each.cache_clear()


def shipped(count: int, size: int) -> dict[int, object]:
    """What vLLM ships."""
    folder = Path(fused_moe.__file__).parent / "configs"
    name = f"E={count},N={size},device_name={DEVICE}.json"
    tilings = json.loads((folder / name).read_text())
    return {int(tokens): tiling for tokens, tiling in tilings.items() if tokens.isdigit()}


def test_half_of_the_experts_takes_the_tiling_of_all() -> None:
    """Qwen3-30B-A3B in width 2."""
    whole = shipped(WHOLE, 768)
    assert find_tilings(64, 768, None) == whole
    chosen = triton_moe.try_get_optimal_moe_config(
        (64, 1536, 2048), (64, 2048, 768), top_k=8, dtype=None, M=1
    )
    assert chosen == whole[1]


def test_a_range_with_a_tiling_of_its_own_keeps_it() -> None:
    own = shipped(64, 1280)
    assert find_tilings(64, 1280, None) == own


def test_what_a_user_has_tuned_for_all_experts_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiling = {"16": {"BLOCK_SIZE_M": 16}}
    (tmp_path / f"E={WHOLE},N=32,device_name={DEVICE}.json").write_text(json.dumps(tiling))
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    assert find_tilings(32, 32, None) == {16: tiling["16"]}


@pytest.mark.parametrize(("count", "size"), [(96, 768), (64, 33)])
def test_others_get_vllms_general_tiling(count: int, size: int) -> None:
    """Of experts that are no range of the model's, or of a size that nobody has tuned."""
    assert find_tilings(count, size, None) is None
