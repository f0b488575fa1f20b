"""The same promises on two GPUs: numbers of static vLLM, exact pauses, no growth over switches.

Needs NVIDIA GPUs and vLLM's CUDA build: `python -m pytest -m gpu tests/gpu`. Two ranks share a
single one if NCCL can (2.30); what bf16 changes by nature is then taken from vLLM's fp32.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.harness.cells import devices
from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.vllm.cuda_scores import ENGINE, moved_logits, score, scored, static_scores

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

RANKS = 2
TASKS = 24
TOKENS = 200


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Plain vLLM's scores by tp size; on a single GPU those of fp32 stand in for those of tp2."""
    folder = tmp_path_factory.mktemp("static")
    alone = static_scores(folder, 1)
    if devices.ranks_per_device(RANKS) > 1:
        return {1: alone, 2: static_scores(folder, 1, "float32")}
    return {1: alone, 2: static_scores(folder, 2)}


@pytest.fixture(scope="module", params=("replica", "ffn", "all"))
def cell(
    request: pytest.FixtureRequest,
    static: dict[int, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[BareCell]:
    """Two ranks with the demo model in bf16, started when plain vLLM has left them.

    Each holds all weights, or half of them and borrows the other half of some layers.
    """
    is_whole = request.param == "replica"
    weights = {} if is_whole else {"weight_parts": RANKS, "borrow": request.param}
    folder = tmp_path_factory.mktemp("cuda")
    with bare_cell(
        folder,
        ranks=RANKS,
        engine_args=[*ENGINE, *devices.engine_args(RANKS)],
        device="cuda",
        limits={**devices.limits(RANKS), **weights},
        pause_limit_ms=60_000,
    ) as up:
        yield up


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
        await client.wait_first_tokens(*names)
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


def test_moved_tasks_keep_their_kv(static: dict[int, Any], cell: BareCell) -> None:
    by_nature = np.abs(static[2] - static[1]).max()
    moved = asyncio.run(moved_logits(cell, "dp2", ["tp2", "dp2"] * 6, TOKENS))
    given = asyncio.run(scored(cell, "dp2", [ids for ids, _ in moved]))
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
