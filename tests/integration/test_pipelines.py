"""Pipeline groups: each family as static vLLM computes it, and streams that cross all modes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.cells.bare_cell import bare_cell
from tests.harness.cells.crossed_stream import cross
from tests.harness.vllm.answers import ENGINE_ARGS, answers
from tests.harness.vllm.families import BY_SLUG, Family
from tests.harness.vllm.reference_files import reference
from tests.harness.vllm.references import FP32_TOLERANCE
from tests.harness.vllm.tiny_models import make_family

pytestmark = pytest.mark.ranks

PIPELINES: dict[str, Any] = {"pipelines": ["pp2"]}
OFTEN = ("olmo-2", "gemma-2")


def probe_errors(folder: Path) -> dict[str, float]:
    """How far each mode of rank 0 was from dp when it started, in nats."""
    lines = (folder / "worker.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if '"mode_probed"' in line]
    return {each["mode"]: each["error_nats"] for each in events if each["rank"] == 0}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", [BY_SLUG[slug] for slug in OFTEN], ids=OFTEN)
async def test_family(family: Family, tmp_path: Path) -> None:
    """Two stages alone, then a stream that crosses all modes."""
    model = make_family(family, tmp_path / "model")
    expected, folder = reference(family.slug, model), tmp_path / "cell"
    folder.mkdir()
    layouts = ("pp2", "tp2", "pp2", "sp2", "pp2", "dp2")
    with bare_cell(folder, ranks=2, engine_args=ENGINE_ARGS, model=model, limits=PIPELINES) as cell:
        cell.switch("pp2")
        streams, scores = await answers(cell, "pp2", expected.prompts, expected.text)
        expected.check(streams, scores, FP32_TOLERANCE, f"{family.name}, pp2")
        cell.switch("dp2")
        moved = await cross(cell, "moved", expected.prompts[-1], layouts, 700)
        calm = await cross(cell, "calm", expected.prompts[-1], (), len(moved.tokens))
    assert probe_errors(folder)["pp2"] == 0.0, "no sum is divided, so every bit is that of dp"
    assert moved.tokens == calm.tokens
    difference = np.abs(np.subtract(moved.logprobs, calm.logprobs)).max()
    print(f"{family.name}: a stream across {layouts} differs by {difference:.2e}")
    assert difference < FP32_TOLERANCE
