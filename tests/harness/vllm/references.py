"""The prompts and the text that references are of, and what a cell makes of them."""

import functools

import numpy as np

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient
from tests.harness.cells.servers import MODEL
from tests.harness.vllm.reference_catalog import LENGTHS

NEW_TOKENS = 12
SCORED_TOKENS = 600
FP32_TOLERANCE = 1e-4
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


async def run_all(
    cell: BareCell, tag: str, prompts: list[list[int]], text: list[int]
) -> tuple[list[Stream], np.ndarray]:
    """Generate for all prompts at once, then score the text: streams and log-probabilities."""
    client = TaskClient()
    async with client.connected(cell):
        names = [f"{tag}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            client.submit(name, prompt, max_tokens=NEW_TOKENS, logprobs=-1)
        streams = await client.finish(*names)
        client.submit(f"{tag}-score", text, max_tokens=1, prompt_logprobs=0)
        scored = (await client.finish(f"{tag}-score"))[0]
    return streams, np.asarray(scored.prompt_logprobs.logprobs)[:, 0]
