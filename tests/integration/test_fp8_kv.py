"""An fp8 KV cache in every layout: static vLLM's numbers, exact streams, pages of a quarter.

Weights and activations are fp32, so pages of fp8 have a quarter of the bytes. A value between two
numbers of fp8 may be rounded to either where sums have another order, as in static tp.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.log_events import events_of
from tests.harness.cells.lost_ranks import (
    HASTY,
    SOON,
    back,
    kill,
    pids_of,
    submit,
    tokens_of,
)
from tests.harness.cells.random_switches import LAYOUTS, cross_switches
from tests.harness.cells.servers import MODEL
from tests.harness.vllm.answers import ENGINE_ARGS, answers
from tests.harness.vllm.reference_files import Reference, reference
from tests.harness.vllm.references import FP32_TOLERANCE
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

SWITCHES = 15
TOKENS = 300
ROUNDING = 10 * FP32_TOLERANCE
"""What logits may be off by at least: what is computed together decides the order of sums, too."""
SCALED_ROUNDING = 0.02
"""The same of a model whose logits are larger; static tp 1 and 2 differ by 0.003."""
FP8 = ["--kv-cache-dtype", "fp8"]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    with bare_cell(tmp_path_factory.mktemp("fp8"), ranks=2, engine_args=[*ENGINE_ARGS, *FP8]) as up:
        yield up


@pytest.fixture(scope="module")
def static() -> dict[int, Reference]:
    """Static vLLM with such a cache, by tp size."""
    return {1: reference("demo-fp8-kv", MODEL), 2: reference("demo-fp8-kv-tp2", MODEL)}


@dataclass
class Scaled:
    """A checkpoint with scales of its own for K and V of each layer, and static vLLM's numbers."""

    cell: BareCell
    static: Reference


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    """No option names the type of the cache."""
    folder = tmp_path_factory.mktemp("scales")
    model = model_of("kv-scales", folder)
    with bare_cell(
        folder, ranks=2, model=model, engine_args=ENGINE_ARGS, limits=dict(SOON), **HASTY
    ) as up:
        yield Scaled(up, reference("kv-scales", model))


def far_apart(static: dict[int, Reference]) -> float:
    """How far single scores of static tp 1 and 2 differ."""
    return float(np.abs(static[1].arrays["scores"] - static[2].arrays["scores"]).max())


async def test_each_layout_computes_what_static_vllm_does(
    cell: BareCell, static: dict[int, Reference]
) -> None:
    limit = max(ROUNDING, 2 * far_apart(static))
    plain = reference("demo", MODEL).arrays["scores"]
    for layout in LAYOUTS:
        await asyncio.to_thread(cell.switch, layout)
        streams, scores = await answers(cell, layout, static[1].prompts, static[1].text)
        static[1].check(streams, scores, limit, layout)
        if layout == "dp2":
            assert np.abs(scores - static[1].arrays["scores"]).max() < FP32_TOLERANCE
        assert np.abs(scores - plain).max() > 10 * limit, "the cache is not of fp8"


async def test_streams_are_exact_over_random_switches(cell: BareCell) -> None:
    """KV moves as bytes, and nothing is computed again."""
    client = TaskClient()
    async with client.connected(cell):
        await asyncio.to_thread(cell.switch, "tp2")
        calm = tokens_of(await client.finish(*submit(client, "calm", TOKENS)))
        names = submit(client, "switched", TOKENS)
        streams, records = await cross_switches(cell, client, names, seed=36, switches=SWITCHES)
    assert tokens_of(streams) == calm
    assert sum(record["reshard_bytes"] for record in records) > 0


def test_pages_have_a_quarter_of_the_bytes(cell: BareCell, tmp_path: Path) -> None:
    def pages_of(of: BareCell) -> float:
        kv_bytes = of.get("/admin/ranks")["ranks"][0]["memory"]["kv"]
        return float(of.get("/admin/layout")["groups"][0]["pages_total"] / kv_bytes)

    cell.switch("dp2")
    with bare_cell(tmp_path, ranks=1, engine_args=ENGINE_ARGS) as plain:
        assert pages_of(cell) / pages_of(plain) == pytest.approx(4, rel=0.01)


async def check_layouts(scaled: Scaled, tag: str) -> None:
    for layout in LAYOUTS:
        await asyncio.to_thread(scaled.cell.switch, layout)
        name = f"{tag}-{layout}"
        streams, scores = await answers(
            scaled.cell, name, scaled.static.prompts, scaled.static.text
        )
        scaled.static.check(streams, scores, SCALED_ROUNDING, name)


async def test_scales_of_a_checkpoint_count_in_every_layout(scaled: Scaled) -> None:
    """Without them scores are off by 1.1."""
    await check_layouts(scaled, "scaled")


async def test_a_rank_that_returns_has_the_scales(scaled: Scaled) -> None:
    """It finds its weights in memory, and reads no checkpoint."""
    before = pids_of(scaled.cell)
    await asyncio.to_thread(kill, scaled.cell, 1, before[1])
    await asyncio.to_thread(back, scaled.cell, "rank 1")
    built = [
        each["loaded_bytes"]
        for each in events_of(scaled.cell.log("worker"), "rank_built")
        if each["rank"] == 1
    ]
    assert built[0] > 0
    assert built[1:] == [0]
    await check_layouts(scaled, "returned")
