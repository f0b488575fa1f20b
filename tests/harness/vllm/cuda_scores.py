"""What GPU tests compare: teacher-forced scores of plain vLLM, of a layout, and of moved tasks."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.cells import devices
from tests.harness.cells.bare_cell import BareCell, TaskClient
from tests.harness.cells.servers import MODEL
from tests.harness.vllm.static_process import run_static

ENGINE = [*devices.CUDA_ENGINE, "--logprobs-mode", "raw_logits", "--max-logprobs", "-1"]
SCORED = 600
NUMBERS = itertools.count()


def text() -> list[int]:
    """A stretch of held-out text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids: list[int] = tokenizer.encode((MODEL / "heldout.txt").read_text(), verbose=False)
    return ids[:SCORED]


def static_scores(folder: Path, tp: int, dtype: str = "bfloat16") -> Any:
    """Teacher-forced log-probabilities of plain vLLM in a process of its own."""
    (scores,) = scores_of(folder, [text()], tp=tp, dtype=dtype, max_tokens=2)
    return scores


def scores_of(folder: Path, texts: Sequence[list[int]], *, tp: int, **spec: Any) -> list[Any]:
    """The same of each of these texts; what `spec` says otherwise is for `static_vllm`."""
    given = {
        "model": str(MODEL),
        "dtype": "bfloat16",
        "tp": tp,
        "shares_device": devices.ranks_per_device(tp) > 1,
        "max_model_len": 1024,
        "gpu_memory_utilization": 0.3,
        "max_tokens": 1,
        "prompts": [texts[0][:20]],
        "texts": texts,
        **spec,
    }
    out = folder / f"static-{tp}-{given['dtype']}.npz"
    run_static("tests.harness.vllm.static_vllm", given, out, on_cuda=True)
    with np.load(out) as arrays:
        return [arrays[f"scores_{number}"] for number in range(len(texts))]


async def score(cell: BareCell, layout: str) -> Any:
    """Teacher-forced log-probabilities in one layout."""
    await asyncio.to_thread(cell.switch, layout, "recompute")
    client = TaskClient()
    async with client.connected(cell):
        # The coordinator takes a name that comes again for a repetition.
        name = f"score-{layout}-{next(NUMBERS)}"
        client.submit(name, text(), max_tokens=1, prompt_logprobs=0)
        stream = (await client.finish(name))[0]
    return np.asarray(stream.prompt_logprobs.logprobs)[:, 0]


async def moved_logits(
    cell: BareCell, origin: str, layouts: Sequence[str], tokens: int
) -> list[tuple[list[int], Any]]:
    """Tasks moved from layout to layout: each one's whole text, and the logits it was drawn by."""
    await asyncio.to_thread(cell.switch, origin, "recompute")
    client = TaskClient()
    async with client.connected(cell):
        words = text()
        prompts = [words[start : start + 150 + 10 * start] for start in range(0, 16, 2)]
        names = [f"moved-{number}" for number in range(len(prompts))]
        for name, ids in zip(names, prompts, strict=True):
            client.submit(name, ids, max_tokens=tokens, logprobs=-1)
        await client.wait_first_tokens(*names)
        for layout in layouts:
            await asyncio.to_thread(cell.switch, layout, "reshard")
            await asyncio.sleep(0.03)
        streams = await client.finish(*names)
    drawn = [
        np.array([row[token] for row, token in zip(each.logits, each.tokens, strict=True)])
        for each in streams
    ]
    whole = [[*ids, *each.tokens] for ids, each in zip(prompts, streams, strict=True)]
    return list(zip(whole, drawn, strict=True))


async def scored(cell: BareCell, layout: str, texts: list[list[int]]) -> list[Any]:
    """The logits of texts that are given, one after the other, in one layout."""
    await asyncio.to_thread(cell.switch, layout, "recompute")
    client = TaskClient()
    found = []
    async with client.connected(cell):
        for number, ids in enumerate(texts):
            client.submit(f"given-{number}", ids, max_tokens=1, prompt_logprobs=0)
            stream = (await client.finish(f"given-{number}"))[0]
            found.append(np.asarray(stream.prompt_logprobs.logprobs)[:, 0])
    return found
