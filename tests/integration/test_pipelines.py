"""Pipeline groups: families as static vLLM computes them, streams that cross modes, lost stages."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.crossed_stream import cross
from tests.harness.cells.lost_ranks import (
    all_serve,
    back,
    begun,
    four_ranks,
    kill,
    pids_of,
    serves,
    submit,
    tell_pauses,
    tokens_of,
    until,
)
from tests.harness.vllm.answers import ENGINE_ARGS, answers
from tests.harness.vllm.families import BY_SLUG, Family
from tests.harness.vllm.reference_files import reference
from tests.harness.vllm.references import FP32_TOLERANCE
from tests.harness.vllm.tiny_models import make_family, model_of

pytestmark = pytest.mark.ranks

PIPELINES: dict[str, Any] = {"pipelines": ["pp2"]}
OFTEN = ("olmo-2", "gemma-2")
PARAMS: dict[str, Any] = {"logprobs": 1, "ignore_eos": True}
STAGES = {3: ("pp4", "first"), 1: ("pp4", "third"), 0: ("pp4", "last"), 2: ("pp2tp2", "first")}
"""The layout in which each rank is killed, and its stage there."""


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


@pytest.mark.timeout(400)
async def test_no_stream_notices_that_stages_die(tmp_path: Path, record_property: Any) -> None:
    """The first, a middle and the last stage, and one of two ranks of a stage, in mid-stream.

    Each comes back into its group.
    """
    limits, model = {"pipelines": ["pp4", "pp2tp2"]}, model_of("four-layers", tmp_path)
    folder = tmp_path / "cell"
    folder.mkdir()
    with four_ranks(folder, model=model, limits=limits) as cell:
        client = TaskClient()
        async with client.connected(cell):
            calm = await client.finish(*submit(client, "calm", **PARAMS))
        for rank, (layout, stage) in STAGES.items():
            cell.switch(layout, "reshard")
            streams = await through_loss(cell, f"{stage} stage of {layout}", layout, rank)
            assert tokens_of(streams) == tokens_of(calm)
            differences = [
                np.abs(np.subtract(each.logprobs, other.logprobs)).max()
                for each, other in zip(streams, calm, strict=True)
            ]
            assert max(differences) < FP32_TOLERANCE
            pause_s = tell_pauses(f"{stage} stage of {layout}", streams)
            record_property("summary", f"{stage} stage of {layout} lost: pause {pause_s:.2f} s")
            assert pause_s < cell.config.cell.step_limit_ms / 2e3
            until(cell, "whole", all_serve)
            took_s = until(cell, f"in {layout} again", serves(layout))
            print(f"{layout} again {took_s:.1f} s after all ranks serve")
            back(cell, f"{stage} stage of {layout}")
            async with client.connected(cell):
                again = await client.finish(*submit(client, f"after {rank}", **PARAMS))
            assert tokens_of(again) == tokens_of(calm)
        assert "rank_stuck" not in cell.log("worker")


async def through_loss(cell: BareCell, tag: str, layout: str, rank: int) -> list[Stream]:
    """Kill a rank in the middle of all streams; returns them at their end."""
    client, before = TaskClient(), pids_of(cell)
    async with client.connected(cell):
        names = submit(client, tag, **PARAMS)
        await begun(client, names)
        assert serves(layout)(cell)
        seen_s = await asyncio.to_thread(kill, cell, rank, before[rank])
        unfinished = sum(not client.streams[name].finished for name in names)
        streams = await client.finish(*names)
    print(f"{tag}: exit seen after {seen_s * 1e3:.0f} ms, with {unfinished} streams")
    assert unfinished == len(names)
    after = pids_of(cell)
    assert {each for each in after if after[each] != before[each]} <= {rank}, "others live on"
    return streams
