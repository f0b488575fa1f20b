"""What static vLLM computes for a set of prompts, and how far a cell is from it."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient
from tests.harness.cells.servers import MODEL
from tests.harness.vllm.static_process import run_static

LENGTHS = (5, 6, 9, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100, 128, 150, 200, 255, 300, 350, 400)
NEW_TOKENS = 12
SCORED_TOKENS = 600
FP32_TOLERANCE = 1e-4
REFERENCES: dict[tuple[str, str, int], dict[str, Any]] = {}
"""What plain vLLM has computed so far, by the model's name, the dtype and its tp."""
LOGITS_ARGS = ["--logprobs-mode", "raw_logits", "--max-logprobs", "-1", "--max-model-len", "1024"]


@functools.cache
def prompts_and_text() -> tuple[list[list[int]], list[int]]:
    """Prompts of 5 to 400 tokens and a stretch to score, all held-out text, none overlapping."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer.encode((MODEL / "heldout.txt").read_text(), verbose=False)
    prompts, start = [], 0
    for length in LENGTHS:
        prompts.append(ids[start : start + length])
        start += length
    return prompts, ids[start : start + SCORED_TOKENS]


def static(
    folder: Path, model: Path = MODEL, dtype: str = "float32", tp: int = 1
) -> dict[str, Any]:
    """What plain vLLM computes, once for all modules of a run; models of one name are equal."""
    key = model.name, dtype, tp
    if (known := REFERENCES.get(key)) is not None:
        return known
    prompts, text = prompts_and_text()
    spec = {
        "model": str(model),
        "dtype": dtype,
        "tp": tp,
        "max_model_len": 1024,
        "max_tokens": NEW_TOKENS,
        "prompts": prompts,
        "texts": [text],
    }
    out = folder / f"static-{dtype}-{tp}.npz"
    run_static("tests.harness.vllm.static_vllm", spec, out)
    with np.load(out) as arrays:
        REFERENCES[key] = dict(arrays)
    return REFERENCES[key]


async def run_all(cell: BareCell, tag: str) -> tuple[list[Stream], np.ndarray]:
    """Generate for all prompts at once, then score the text: streams and log-probabilities."""
    prompts, text = prompts_and_text()
    client = TaskClient()
    async with client.connected(cell):
        names = [f"{tag}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            client.submit(name, prompt, max_tokens=NEW_TOKENS, logprobs=-1)
        streams = await client.finish(*names)
        client.submit(f"{tag}-score", text, max_tokens=1, prompt_logprobs=0)
        scored = (await client.finish(f"{tag}-score"))[0]
    return streams, np.asarray(scored.prompt_logprobs.logprobs)[:, 0]


def largest_difference(streams: list[Stream], reference: dict[str, Any]) -> float:
    """Largest difference of a logit, over the steps with equal history."""
    worst = 0.0
    for number, stream in enumerate(streams):
        expected = reference[f"logits_{number}"]
        tokens = reference[f"tokens_{number}"]
        assert len(stream.logits) == len(expected) == NEW_TOKENS
        for step, row in enumerate(stream.logits):
            worst = max(worst, float(np.abs(row - expected[step]).max()))
            if stream.tokens[step] != tokens[step]:
                break
    return worst
