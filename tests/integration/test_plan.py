"""`aileron plan` agrees with cells that really start: weights and KV within 3 %."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells.bare_cell import bare_cell, search_path
from tests.harness.vllm.tiny_models import model_of

pytestmark = pytest.mark.ranks

AGREES = 0.03
BLOCK_TOKENS = 32
KV_BYTES = 24 * 2**20
ENGINE_ARGS = ["--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes"]
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("demo", {"host_kv_gib": 0.0625}),
    ("demo", {"weight_parts": 2, "borrow": "ffn", "layout": "tp2"}),
    ("qwen3-moe", {"weight_parts": 2, "borrow": "ffn", "layout": "tp2"}),
    ("untied", {"weight_parts": 2, "borrow": "all", "layout": "tp2", "whole_layers": 1}),
    ("gemma-2", {"weight_parts": 2, "borrow": "none", "layout": "tp2"}),
)
"""The models, and how ranks hold their weights: whole, and in parts with each way to borrow."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("name", "cell"), CASES, ids=lambda case: str(case)[:40])
def test_a_cell_holds_what_the_plan_says(name: str, cell: dict[str, Any], tmp_path: Path) -> None:
    model, folder = model_of(name, tmp_path), tmp_path / "cell"
    folder.mkdir()
    engine_args = [*ENGINE_ARGS, str(KV_BYTES)]
    with bare_cell(folder, ranks=2, engine_args=engine_args, model=model, limits=cell) as started:
        ranks = started.get("/admin/ranks")["ranks"]
        layout = started.get("/admin/layout")
    found = plan_of(model, cell, engine_args)
    (planned,) = found["cells"]
    hosted = sum(rank["gauges"].get("host_pages", 0) for rank in ranks)
    assert (found["host_kv_tokens"] or 0) == BLOCK_TOKENS * hosted
    assert planned["fits"]
    for rank in ranks:
        memory = rank["memory"]
        print(name, cell, memory, {key: planned[f"{key}_bytes"] for key in ("weights", "ring")})
        assert planned["weights_bytes"] == pytest.approx(memory["weights"], rel=AGREES)
        assert planned["kv_bytes"] == pytest.approx(memory["kv"], rel=AGREES)
        for key in ("ring", "whole_layers"):
            assert planned[f"{key}_bytes"] == pytest.approx(memory.get(key, 0), rel=AGREES)
    served = next(each for each in planned["layouts"] if each["layout"] == layout["layout"])
    own = layout["groups"][0]
    geometry_tokens = served["group_tokens"][0] // (planned["pages"] - 1)
    assert planned["pages"] - 1 == own["pages_total"] == own["pages_free"]
    assert geometry_tokens == BLOCK_TOKENS * own["width"]


def plan_of(model: Path, cell: dict[str, Any], engine_args: list[str]) -> Any:
    """The plan of one way to hold the weights, by the command line."""
    words = [str(model), "--gpus", "2", "--device", "cpu", "--json"]
    words += ["--weight-parts", str(cell.get("weight_parts", 1))]
    if "host_kv_gib" in cell:
        words += ["--host-kv", str(cell["host_kv_gib"])]
    if "borrow" in cell:
        words += ["--borrow", cell["borrow"], "--whole-layers", str(cell.get("whole_layers", 0))]
    output = subprocess.run(
        [sys.executable, "-m", "coordinator.cli", "plan", *words, "--", *engine_args],
        env={**os.environ, "PYTHONPATH": search_path()},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return json.loads(output)
