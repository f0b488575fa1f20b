"""Random requests through layouts with pipeline groups, by every carry plan, with few pages: exact.

Seeds are fixed; AILERON_RESHARD_SEEDS="17" or "100-199" runs others. A failure names its seed. The
streams are what the same ranks make of each request alone, in dp and without switches;
`test_pipelines.py` compares the modes with static vLLM.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.cells.admin import post
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.gauges import all_there, total
from tests.harness.cells.random_load import (
    RANDOM_ARGS,
    TOLERANCE,
    alone,
    compare,
    records_after,
    run_cases,
    settle,
)
from tests.harness.vllm.reshard_cases import Case, wanted_cases
from tests.harness.vllm.static_pipeline import TOKENS
from tests.harness.vllm.static_process import run_static
from tests.harness.vllm.tiny_models import model_of
from worker.rank.leases import RESCUE_S

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("ranks-four"),
]

SEEDS = 32
ROUNDS = 2
AT_ONCE = 24
FEW_PAGES_BYTES = 12 << 20
"""Less than the tasks need together, so vLLM preempts some in every mode."""
HOST_KV_GIB = 0.03
"""Less than the tasks need together, so pages are evicted."""
LAYOUTS = ("dp4", "pp4", "tp4", "pp2+pp2", "sp4", "pp2tp2", "pp2+dp2", "tp2+pp2", "pp2tp2")
KILL_EVERY, FIRST_KILL = 8, 2
"""Of the actions, where there are kills: the others are switches."""
CROSSED = ("pp4", "pp2tp2", "tp4", "pp2+pp2", "pp2tp2", "sp4", "pp4", "pp2+dp2", "dp4")
CROSSING = 8
CROSSING_PROMPT, CROSSING_TOKENS = 50, 160
PLANS = ("reshard", "reshard", "pause", "recompute", "drain")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose layers four stages divide."""
    return model_of("four-layers", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[0.0, HOST_KV_GIB], ids=["alone", "host pages and kills"])
def cell(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareCell]:
    with bare_cell(
        tmp_path_factory.mktemp("pipelines"),
        ranks=4,
        engine_args=[*RANDOM_ARGS, "--kv-cache-memory-bytes", str(FEW_PAGES_BYTES)],
        model=model,
        limits={"pipelines": ["pp2", "pp4", "pp2tp2"], "host_kv_gib": request.param},
        precopy="off" if request.param else "on",
        # Two long pauses in a row would let a task that waits for pages seem to hang.
        pause_limit_ms=5_000,
    ) as running:
        yield running


def known(streams: dict[int, Stream]) -> dict[int, Any]:
    """The streams as `compare` wants those of static vLLM."""
    return {
        seed: {"tokens": stream.tokens, "scores": stream.logprobs}
        for seed, stream in streams.items()
    }


def computed_tokens(cell: BareCell) -> int:
    """Tokens that all groups have computed, each once whatever its width."""
    ranks = cell.get("/admin/ranks")["ranks"]
    return sum(int(rank["gauges"]["computed_tokens"]) for rank in ranks)


def kill_one(cell: BareCell, draw: random.Random) -> bool:
    """Kill any rank if all are there."""
    ranks = cell.get("/admin/ranks")["ranks"]
    is_whole = all(rank.get("available") for rank in ranks)
    if is_whole:
        os.kill(draw.choice(ranks)["pid"], signal.SIGKILL)
    return is_whole


async def crossing(cell: BareCell, tag: str, layouts: tuple[str, ...]) -> list[list[int]]:
    """Eight streams, half of them sampled, with these switches meanwhile; returns their tokens."""
    client = TaskClient()
    names = [f"{tag}-{number}" for number in range(CROSSING)]
    async with client.connected(cell):
        for number, name in enumerate(names):
            client.submit(
                name,
                random.Random(number).choices(range(10, 4000), k=CROSSING_PROMPT),
                max_tokens=CROSSING_TOKENS,
                temperature=0.9 if number % 2 else 0.0,
                seed=number,
                ignore_eos=True,
            )
        for number, layout in enumerate(layouts, 1):
            # On a busy machine some streams are far ahead, and one that ends moves no more.
            wanted = CROSSING * CROSSING_TOKENS * number // (len(layouts) + 4)
            while sum(len(each.tokens) for each in client.streams.values()) < wanted:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(cell.switch, layout, "reshard")
        return [stream.tokens for stream in await client.finish(*names)]


async def test_nothing_is_computed_again_while_pages_suffice(cell: BareCell) -> None:
    """Streams go on through all modes with their KV."""
    before = computed_tokens(cell)
    moved = await crossing(cell, "moved", CROSSED)
    # Nobody computes the last token of a stream.
    wanted = before + CROSSING * (CROSSING_PROMPT + CROSSING_TOKENS - 1)
    deadline = time.monotonic() + 5
    while computed_tokens(cell) < wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.1)  # Heartbeats report the gauges.
    assert computed_tokens(cell) == wanted
    records = cell.get(f"/admin/switches?last={len(CROSSED)}")["switches"]
    assert [record["to"] for record in records] == [*CROSSED]
    assert all(record["tasks"]["recompute"] == 0 for record in records), records
    assert sum(record["tasks"]["reshard"] for record in records) >= CROSSING * (len(CROSSED) - 1)
    assert moved == await crossing(cell, "calm", ())


@pytest.mark.long
@pytest.mark.parametrize("layout", ["pp2+pp2", "pp4", "pp2tp2"])
async def test_vllms_own_pipeline_computes_the_same(
    layout: str, cell: BareCell, model: Path, tmp_path: Path
) -> None:
    prompts = [random.Random(k).choices(range(10, 4000), k=9 + 30 * k) for k in range(4)]
    spec = {"model": str(model), "stages": 2, "prompts": prompts}
    run_static("tests.harness.vllm.static_pipeline", spec, tmp_path / "answers.json")
    expected = json.loads((tmp_path / "answers.json").read_text())
    cell.switch(layout)
    client = TaskClient()
    async with client.connected(cell):
        names = [f"static-{layout}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            client.submit(name, prompt, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
        streams = await client.finish(*names)
    for stream, each in zip(streams, expected, strict=True):
        assert stream.tokens == each["tokens"]
        assert np.abs(np.subtract(stream.logprobs, each["logprobs"])).max() < TOLERANCE


async def test_streams_are_exact_through_pipeline_groups(cell: BareCell) -> None:
    cases: list[Case] = wanted_cases(SEEDS)
    draw = random.Random(len(cases))
    reference = await alone(cell, cases)
    before, epoch = settle(cell), cell.get("/admin/status")["epoch"]
    client, actions, kills = TaskClient(), 0, 0
    async with client.connected(cell):

        async def rounds() -> list[dict[int, Stream]]:
            return [
                await run_cases(client, f"stage-{number}", cases, AT_ONCE)
                for number in range(ROUNDS)
            ]

        running = asyncio.create_task(rounds())
        while not running.done():
            wanted = sum(len(each.tokens) for each in client.streams.values())
            wanted += draw.randint(20, 200)
            while not running.done() and wanted > sum(
                len(each.tokens) for each in client.streams.values()
            ):
                await asyncio.sleep(0.01)
            actions += 1
            if cell.config.cell.host_kv_gib and actions % KILL_EVERY == FIRST_KILL:
                kills += await asyncio.to_thread(kill_one, cell, draw)
                continue
            order = {"layout": draw.choice(LAYOUTS), "carry": draw.choice(PLANS)}
            status, answer = await asyncio.to_thread(post, cell.admin + "/admin/layout", order)
            # While a rank is away, a layout that names it is refused.
            is_away = kills and "not available" in answer.get("error", {}).get("message", "")
            assert status == 200 or is_away, answer
        served = await running
    worst = max(compare(cases, streams, known(reference), reference) for streams in served)
    records = records_after(cell, epoch)
    carried = Counter[str]()
    for record in records:
        carried.update(record["tasks"])
    reached = Counter(record["to"] for record in records)
    hits = [await total(cell, f"{kind}_hits") for kind in ("host", "lost")]
    done = f"{kills} kills, {hits} tokens from host pages and lost groups"
    print(f"\n{len(records)} switches to {dict(reached)}, {dict(carried)}, {done}, {worst:.1e}")
    assert carried["reshard"] > 0
    assert any("pp" in layout for layout in reached)
    if cell.config.cell.host_kv_gib:
        assert kills
        assert hits[0] > 0
        await all_there(cell)
        # Groups that were formed meanwhile have fewer pages, but too many to be formed anew.
        await asyncio.sleep(RESCUE_S)
        cell.switch("tp4", "recompute")
    assert settle(cell) == before
    assert "Traceback" not in Path(cell.folder / "worker.log").read_text()
