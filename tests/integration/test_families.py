"""Families of models: dp, tp and sp compute what static vLLM computes, also across switches.

The references are plain vLLM's (tp 1), as the repository keeps them; fp32 must agree to 1e-4. What
is not served is refused with the reason.
"""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.harness.cells.bare_cell import bare_cell, search_path
from tests.harness.cells.crossed_stream import TOKENS_OF_EACH, TOKENS_OF_THE_LAST, cross
from tests.harness.cells.servers import MODEL
from tests.harness.cells.warm import run_module
from tests.harness.vllm.answers import ENGINE_ARGS, answers
from tests.harness.vllm.families import BY_SLUG, FAMILIES, REFUSED, SERVED, Family
from tests.harness.vllm.reference_files import reference
from tests.harness.vllm.references import FP32_TOLERANCE
from tests.harness.vllm.tiny_models import make_family

pytestmark = pytest.mark.ranks

OFTEN = (
    *("olmo-2", "gemma-2", "gpt-2", "phi-3-phi-4", "glm-4-5", "phi-1-5-phi-2"),
    *("nemotron", "smollm3"),
)
"""Those of which no two are made of the same layers; the others are tested by `make test-long`."""
CROSSING_TOKENS = 700
"""As many as no stream has before it has crossed all layouts; nobody waits for the last of them."""
CROSSED = ("tp2", "sp2", "dp2")


def cases() -> list[Any]:
    """Every family that is served, by its name."""
    often = [pytest.param(BY_SLUG[slug], id=slug) for slug in OFTEN]
    long = [
        pytest.param(family, id=family.slug, marks=pytest.mark.long)
        for family in SERVED
        if family.slug not in OFTEN
    ]
    return often + long


@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", cases())
async def test_family(family: Family, tmp_path: Path) -> None:
    """Each layout, then a stream that crosses all of them."""
    model = make_family(family, tmp_path / "model")
    expected, folder = reference(family.slug, model), tmp_path / "cell"
    folder.mkdir()
    with bare_cell(folder, ranks=2, engine_args=ENGINE_ARGS, model=model) as cell:
        for layout in ("dp2", "tp2", "sp2"):
            cell.switch(layout)
            streams, scores = await answers(cell, layout, expected.prompts, expected.text)
            expected.check(streams, scores, FP32_TOLERANCE, f"{family.name}, {layout}")
        cell.switch("dp2")
        moved = await cross(cell, "moved", expected.prompts[-1], CROSSED, CROSSING_TOKENS)
        calm = await cross(cell, "calm", expected.prompts[-1], (), len(moved.tokens))
    assert len(moved.tokens) >= len(CROSSED) * TOKENS_OF_EACH + TOKENS_OF_THE_LAST
    assert moved.tokens == calm.tokens
    difference = np.abs(np.subtract(moved.logprobs, calm.logprobs)).max()
    print(f"{family.name}: a stream across {CROSSED} differs by {difference:.2e}")
    assert difference < FP32_TOLERANCE


def test_the_suite_draws_on_known_families() -> None:
    assert {*OFTEN} <= {family.slug for family in SERVED}
    assert len(BY_SLUG) == len(FAMILIES), "names differ"


def start(folder: Path, model: Path, *, ranks: int, engine_args: list[str]) -> str:
    """Start ranks that must refuse; returns what they said."""
    config = {
        "model": {"path": str(model), "engine_args": engine_args},
        "cell": {"ranks": ranks, "layout": f"dp{ranks}", "widths": [1, ranks]},
    }
    (folder / "cell.yaml").write_text(yaml.safe_dump(config))
    arguments = ["doctor", "--config", str(folder / "cell.yaml")]
    # As the ranks of a cell have it: what has imported for them forks these too.
    env = {**os.environ, "PYTHONPATH": search_path()}
    code, said = run_module("worker", "worker", arguments, env=env, limit_s=120)
    assert code != 0
    return said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", [pytest.param(each, id=each.slug) for each in REFUSED])
def test_a_family_that_is_not_served_is_refused_with_the_reason(
    family: Family, tmp_path: Path
) -> None:
    model = make_family(family, tmp_path / "model")
    said = start(tmp_path, model, ranks=2, engine_args=["--max-model-len", "256"])
    last = said.rstrip().splitlines()[-1]
    assert family.refused in last
    assert "--widths" in last


@pytest.mark.timeout(200)
def test_what_cannot_be_viewed_is_refused_with_the_reason(tmp_path: Path) -> None:
    said = start(tmp_path, MODEL, ranks=2, engine_args=["--quantization", "fp8"])
    assert "cannot be viewed" in said
    said = start(tmp_path, MODEL, ranks=1, engine_args=["--tensor-parallel-size", "2"])
    assert "--ranks and --layout" in said


@pytest.mark.timeout(120)
def test_other_kv_heads_than_config_json_says_are_refused(tmp_path: Path) -> None:
    """Pages would be made for heads that the layers do not have."""
    family = BY_SLUG["gpt-2"]
    model = make_family(
        replace(family, fields={**family.fields, "num_key_value_heads": 2}), tmp_path / "model"
    )
    said = start(tmp_path, model, ranks=1, engine_args=["--max-model-len", "256"])
    assert "has 4 KV heads per rank, and config.json says 2" in said.rstrip().splitlines()[-1]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_the_last_line_is_the_reason_of_a_rank_that_fails(command: str, tmp_path: Path) -> None:
    """Weights of another shape end in an assertion inside of vLLM, which says nothing to a user."""
    model = shutil.copytree(MODEL, tmp_path / "model")
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "vocab_size": 4_000}))
    config = {"model": {"path": str(model)}, "cell": {"ranks": 2}}
    (tmp_path / "cell.yaml").write_text(yaml.safe_dump(config))
    env = {**os.environ, "PYTHONPATH": search_path(), "AILERON_TOKEN": "a-secret-for-tests-only"}
    code, said = run_module(
        "worker", "worker", [command, "--config", str(tmp_path / "cell.yaml")], env=env, limit_s=120
    )
    assert code == 1
    last = said.rstrip().splitlines()[-1]
    assert re.match(r"aileron: rank \d failed: .*\(AssertionError in vllm/", last), last
    assert "the log has the traceback" in last
