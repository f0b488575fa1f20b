"""Families beside Llama: dp and tp logits equal transformers'; others are refused."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import (
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from tests.harness.cells.bare_cell import TaskClient, bare_cell, search_path
from tests.harness.cells.servers import MODEL
from tests.harness.cells.warm import run_module
from tests.harness.vllm.tiny_models import SIZES, make_model

pytestmark = pytest.mark.ranks

FAMILIES = {
    "mistral": MistralConfig(**SIZES, sliding_window=None, initializer_range=0.05),
    "phi3": Phi3Config(**SIZES, pad_token_id=0, sliding_window=None, initializer_range=0.05),
    "qwen2": Qwen2Config(**SIZES, initializer_range=0.05),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True, initializer_range=0.05),
}
LOGITS_ARGS = ["--logprobs-mode", "raw_logits", "--max-logprobs", "-1", "--max-model-len", "256"]
PROMPT = list(range(40, 115))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", FAMILIES)
async def test_family(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", FAMILIES[family])
    folder = tmp_path / "cell"
    folder.mkdir()
    arguments = ["--dtype", "float32", *LOGITS_ARGS]
    with bare_cell(folder, ranks=2, engine_args=arguments, model=tmp_path / "model") as cell:
        for layout in ("dp2", "tp2"):
            cell.switch(layout)
            client = TaskClient()
            async with client.connected(cell):
                client.submit(layout, PROMPT, max_tokens=8, logprobs=-1)
                stream = (await client.finish(layout))[0]
            tokens = torch.tensor([PROMPT + stream.tokens])
            with torch.inference_mode():
                expected = model(tokens).logits[0, len(PROMPT) - 1 : -1].numpy()
            worst = np.abs(np.stack(stream.logits) - expected).max()
            print(family, layout, "largest logit difference", worst)
            assert worst < 2e-4, (family, layout)


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


@pytest.mark.timeout(200)
def test_what_cannot_be_viewed_is_refused_with_the_reason(tmp_path: Path) -> None:
    said = start(tmp_path, MODEL, ranks=1, engine_args=["--quantization", "fp8"])
    assert "cannot be viewed" in said or "cannot be served" in said
    said = start(tmp_path, MODEL, ranks=1, engine_args=["--tensor-parallel-size", "2"])
    assert "--ranks and --layout" in said
    make_model(tmp_path / "sliding", MistralConfig(**SIZES, sliding_window=64))
    said = start(tmp_path, tmp_path / "sliding", ranks=1, engine_args=["--max-model-len", "256"])
    assert "sliding window" in said or "cannot be" in said


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
