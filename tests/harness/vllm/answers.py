"""What a cell answers to the prompts and the text of a stored reference."""

from typing import Any

import numpy as np

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient
from tests.harness.vllm.references import LOGITS_ARGS, NEW_TOKENS

ENGINE_ARGS = ["--dtype", "float32", *LOGITS_ARGS, "--max-num-batched-tokens", "256"]


async def answers(
    cell: BareCell, tag: str, prompts: list[list[int]], text: list[int]
) -> tuple[list[Stream], Any]:
    """The first tokens after each prompt, with all logits, and the scores of a text."""
    client = TaskClient()
    async with client.connected(cell):
        names = [f"{tag}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            client.submit(name, prompt, max_tokens=NEW_TOKENS, logprobs=-1, ignore_eos=True)
        client.submit(f"{tag}-text", text, max_tokens=1, prompt_logprobs=0)
        *streams, scored = await client.finish(*names, f"{tag}-text")
    return streams, np.asarray(scored.prompt_logprobs.logprobs)[:, 0]
