"""The same promises on two GPUs: numbers of static vLLM, exact pauses, no growth over switches.

Needs two NVIDIA GPUs and vLLM's CUDA build: `python -m pytest -m gpu tests/gpu`.
"""

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.servers import MODEL, ROOT
from tests.harness.bare_cell import BareCell, TaskClient, bare_cell

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ENGINE = [
    "--logprobs-mode",
    "raw_logits",
    "--max-logprobs",
    "-1",
    "--max-model-len",
    "1024",
    "--gpu-memory-utilization",
    "0.3",
    "--max-num-seqs",
    "64",
]
SCORED = 600
TASKS = 24
TOKENS = 200
NUMBERS = itertools.count()


def text() -> list[int]:
    """A stretch of held-out text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids: list[int] = tokenizer.encode((MODEL / "heldout.txt").read_text(), verbose=False)
    return ids[:SCORED]


def static_scores(folder: Path, tp: int) -> Any:
    """Teacher-forced log-probabilities of plain vLLM in a process of its own."""
    spec = {
        "model": str(MODEL),
        "dtype": "bfloat16",
        "tp": tp,
        "max_model_len": 1024,
        "max_tokens": 2,
        "prompts": [text()[:20]],
        "texts": [text()],
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    out = folder / f"static-{tp}.npz"
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.static_vllm", str(folder / "spec.json"), str(out)],
        cwd=ROOT,
        env=dict(os.environ),
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as arrays:
        return arrays["scores_0"]


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Plain vLLM's scores by tp size."""
    folder = tmp_path_factory.mktemp("static")
    return {tp: static_scores(folder, tp) for tp in (1, 2)}


@pytest.fixture(scope="module")
def cell(static: dict[int, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Two GPUs with the demo model in bf16, started when plain vLLM has left them."""
    folder = tmp_path_factory.mktemp("cuda")
    with bare_cell(folder, ranks=2, engine_args=ENGINE, device="cuda", pause_limit_ms=60_000) as up:
        yield up


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


def test_loss_is_that_of_static_vllm(static: dict[int, Any], cell: BareCell) -> None:
    by_nature = np.abs(static[2] - static[1])
    for layout in ("dp2", "tp2", "sp2", "shift2"):
        scores = asyncio.run(score(cell, layout))
        error = np.abs(scores - static[1])
        print(layout, "loss", -scores.mean(), "static", -static[1].mean(), "largest", error.max())
        assert error.max() <= max(1.5 * by_nature.max(), 1e-3), layout
        assert abs(scores.mean() - static[1].mean()) < 0.01, layout


async def run(cell: BareCell, tag: str, switches: list[str]) -> list[list[int]]:
    """All tasks at once from dp2, paused by these switches meanwhile."""
    await asyncio.to_thread(cell.switch, "dp2", "recompute")
    client = TaskClient()
    async with client.connected(cell):
        names = [f"{tag}-{number}" for number in range(TASKS)]
        for number, name in enumerate(names):
            ids = random.Random(number).choices(range(10, 4000), k=20 + 9 * number)
            temperature = 0.8 if number % 2 else 0.0
            client.submit(name, ids, max_tokens=TOKENS, temperature=temperature, seed=number)
        await asyncio.sleep(0.1)
        for layout in switches:
            await asyncio.to_thread(cell.switch, layout, "pause")
            await asyncio.sleep(0.02)
        return [stream.tokens for stream in await client.finish(*names)]


def test_streams_are_whole_through_pauses(cell: BareCell) -> None:
    plain = asyncio.run(run(cell, "plain", []))
    paused = asyncio.run(run(cell, "paused", ["tp2", "dp2"] * 4))
    assert all(len(tokens) == TOKENS for tokens in paused)
    # Batches differ in size after a pause, and with them bf16 rounding: most streams are equal.
    equal = sum(one == other for one, other in zip(plain, paused, strict=True))
    print("streams equal to the last bit:", equal, "of", TASKS)
    assert equal >= TASKS // 2


async def moved_logits(cell: BareCell, switches: int) -> list[tuple[list[int], Any]]:
    """Tasks moved between dp2 and tp2: each one's whole text, and the logits it was drawn by."""
    await asyncio.to_thread(cell.switch, "dp2", "recompute")
    client = TaskClient()
    async with client.connected(cell):
        words = text()
        prompts = [words[start : start + 150 + 10 * start] for start in range(0, 16, 2)]
        names = [f"moved-{number}" for number in range(len(prompts))]
        for name, ids in zip(names, prompts, strict=True):
            client.submit(name, ids, max_tokens=TOKENS, logprobs=-1)
        await asyncio.sleep(0.1)
        for turn in range(switches):
            layout = ("tp2", "dp2")[turn % 2]
            await asyncio.to_thread(cell.switch, layout, "reshard")
            await asyncio.sleep(0.03)
        streams = await client.finish(*names)
    drawn = [
        np.array([row[token] for row, token in zip(each.logits, each.tokens, strict=True)])
        for each in streams
    ]
    whole = [[*ids, *each.tokens] for ids, each in zip(prompts, streams, strict=True)]
    return list(zip(whole, drawn, strict=True))


async def scored(cell: BareCell, texts: list[list[int]]) -> list[Any]:
    """The logits of texts that are given, one after the other, in dp2."""
    await asyncio.to_thread(cell.switch, "dp2", "recompute")
    client = TaskClient()
    found = []
    async with client.connected(cell):
        for number, ids in enumerate(texts):
            client.submit(f"given-{number}", ids, max_tokens=1, prompt_logprobs=0)
            stream = (await client.finish(f"given-{number}"))[0]
            found.append(np.asarray(stream.prompt_logprobs.logprobs)[:, 0])
    return found


def test_moved_tasks_keep_their_kv(static: dict[int, Any], cell: BareCell) -> None:
    by_nature = np.abs(static[2] - static[1]).max()
    moved = asyncio.run(moved_logits(cell, 12))
    given = asyncio.run(scored(cell, [ids for ids, _ in moved]))
    records = cell.get("/admin/switches?last=13")["switches"][:12]
    errors = [
        float(np.abs(drawn - logits[-drawn.size :]).max())
        for (_, drawn), logits in zip(moved, given, strict=True)
    ]
    print("largest logit errors of moved tasks", errors, "tp against dp", float(by_nature))
    for record in records:
        print({key: value for key, value in record.items() if value})
    assert sum(record["tasks"]["reshard"] for record in records) >= 12
    assert sum(record["tasks"]["recompute"] for record in records) == 0
    assert max(errors) <= max(4 * by_nature, 0.3)


def test_switches_do_not_grow(cell: BareCell) -> None:
    def gauges() -> list[dict[str, int]]:
        time.sleep(0.6)
        return [dict(rank["gauges"]) for rank in cell.get("/admin/ranks")["ranks"]]

    for layout in ("tp2", "dp2") * 5:
        cell.switch(layout, "pause")
    before = gauges()
    for layout in ("tp2", "dp2") * 50:
        cell.switch(layout, "pause")
    for old, new in zip(before, gauges(), strict=True):
        assert new["process_groups"] == new["process_groups_at_start"]
        assert new["open_files"] <= old["open_files"] + 2
        assert new["rss_bytes"] - old["rss_bytes"] < 32 << 20
    records = cell.get("/admin/switches?last=100")["switches"]
    swaps = sorted(record["swap_ms"] for record in records)
    totals = sorted(record["total_ms"] for record in records)
    print("swap ms p50/max", swaps[50], swaps[-1], "switch ms p50/max", totals[50], totals[-1])
    assert swaps[90] < 1.0


def test_loss_is_the_same_after_the_switches(static: dict[int, Any], cell: BareCell) -> None:
    by_nature = np.abs(static[2] - static[1])
    for layout in ("dp2", "tp2"):
        error = np.abs(asyncio.run(score(cell, layout)) - static[1])
        print(layout, "largest error after the switches", error.max())
        assert error.max() <= max(1.5 * by_nature.max(), 1e-3), layout
