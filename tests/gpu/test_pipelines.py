"""Pipeline groups on GPUs: numbers of dp, streams that cross modes, stages that are lost.

Needs two NVIDIA GPUs, or one and NCCL 2.30, and vLLM's CUDA build: `python -m pytest -m gpu
tests/gpu`. On CPU `make chaos` runs the same, which shows that these tests can be trusted.
"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.harness.cells import devices
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.lost_ranks import (
    all_serve,
    back,
    kill,
    pids_of,
    ranks_of,
    renew,
    tell_pauses,
    until,
)
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.timeout(400)]

RANKS = 2
STREAMS = 16
TOKENS = 240
VOCABULARY = (10, 250)
MOVES = ("pp2", "tp2", "pp2", "sp2", "pp2", "dp2") * 2
ERROR_MAX_NATS = {"cuda": 0.3, "cpu": 1e-4}
"""What bf16 changes where a batch has another size; fp32 on CPU changes nothing."""
PAUSE_LIMIT_S = {"cuda": 3.0, "cpu": 12.0}


@pytest.fixture(scope="module", params=devices.BOTH)
def cell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareCell]:
    device = request.param
    engine, limits = devices.cell_on(device, RANKS, devices.CUDA_ENGINE)
    folder = tmp_path_factory.mktemp("pipelines")
    with bare_cell(
        folder,
        ranks=RANKS,
        engine_args=engine,
        model=model_of("four-layers", folder),
        device=device,
        limits={**limits, "pipelines": ["pp2"]},
        lease_ms=2_500,
        lost_after_ms=3_000,
        pause_limit_ms=60_000,
    ) as up:
        yield up


@pytest.fixture
def whole(cell: BareCell) -> BareCell:
    """The cell, which can form all groups whatever an earlier test has done to it."""
    if any(rank["degraded"] for rank in ranks_of(cell)):
        renew(cell)
    return cell


def prompt(number: int, tokens: int) -> list[int]:
    return random.Random(number).choices(range(*VOCABULARY), k=tokens)


def submit(client: TaskClient, tag: str, **params: Any) -> list[str]:
    """One stream after the other is greedy and drawn; prompts take one step or several."""
    names = [f"{tag}-{number}" for number in range(STREAMS)]
    for number, name in enumerate(names):
        drawn: dict[str, Any] = {"temperature": 0.8 if number % 2 else 0.0, "seed": number}
        client.submit(name, prompt(number, 20 + 40 * number), max_tokens=TOKENS, **drawn, **params)
    return names


async def run(cell: BareCell, tag: str, layout: str, moves: tuple[str, ...] = ()) -> list[Stream]:
    """All streams at once from a layout, moved to others meanwhile."""
    await asyncio.to_thread(cell.switch, layout, "recompute")
    client = TaskClient()
    async with client.connected(cell):
        names = submit(client, tag, logprobs=1, ignore_eos=True)
        await client.wait_first_tokens(*names)
        for number, target in enumerate(moves):
            carry = "pause" if number % 4 == 3 else "reshard"
            await asyncio.to_thread(cell.switch, target, carry)
            await asyncio.sleep(0.05)
        streams = await client.finish(*names)
    assert [len(each.tokens) for each in streams] == [TOKENS] * STREAMS
    return streams


async def scores(cell: BareCell, layout: str, tag: str, texts: list[list[int]]) -> list[Any]:
    """The log-probabilities of texts that are given, one after the other."""
    await asyncio.to_thread(cell.switch, layout, "recompute")
    client, found = TaskClient(), []
    async with client.connected(cell):
        for number, ids in enumerate(texts):
            client.submit(f"{tag}-{number}", ids, max_tokens=1, prompt_logprobs=0)
            stream = (await client.finish(f"{tag}-{number}"))[0]
            found.append(np.asarray(stream.prompt_logprobs.logprobs)[:, 0])
    return found


def test_prompts_have_the_bits_of_dp(whole: BareCell) -> None:
    """No sum is divided: each layer computes what it does in dp."""
    texts = [prompt(100 + number, 5 + 190 * number) for number in range(5)]
    alone = asyncio.run(scores(whole, "dp2", "dp", texts))
    staged = asyncio.run(scores(whole, "pp2", "pp", texts))
    errors = [float(np.abs(one - other).max()) for one, other in zip(alone, staged, strict=True)]
    print("largest differences of prompts in pp2 from dp2", errors)
    assert max(errors) == 0.0


def test_one_stream_has_the_tokens_of_dp(whole: BareCell) -> None:
    async def one(layout: str) -> Stream:
        await asyncio.to_thread(whole.switch, layout, "recompute")
        client = TaskClient()
        async with client.connected(whole):
            name = f"one-{layout}"
            client.submit(name, prompt(7, 300), max_tokens=TOKENS, logprobs=1, ignore_eos=True)
            return (await client.finish(name))[0]

    alone, staged = asyncio.run(one("dp2")), asyncio.run(one("pp2"))
    assert alone.tokens == staged.tokens
    assert alone.logprobs == staged.logprobs


def test_streams_cross_all_modes(whole: BareCell) -> None:
    """Each token is drawn by the logits that the whole text gives it in dp."""
    device = whole.config.cell.device
    streams = asyncio.run(run(whole, "moved", "dp2", MOVES))
    records = whole.get(f"/admin/switches?last={len(MOVES)}")["switches"]
    assert sum(record["tasks"]["recompute"] for record in records) == 0
    assert sum(record["tasks"]["reshard"] for record in records) >= STREAMS
    texts = [[*prompt(n, 20 + 40 * n), *each.tokens] for n, each in enumerate(streams)]
    given = asyncio.run(scores(whole, "dp2", "given", texts))
    errors = [
        float(np.abs(np.asarray(each.logprobs) - of_text[-TOKENS:]).max())
        for each, of_text in zip(streams, given, strict=True)
    ]
    print("largest errors of moved streams", max(errors), errors)
    assert max(errors) <= ERROR_MAX_NATS[device]


@pytest.mark.parametrize("rank", [1, 0], ids=["first", "last"])
def test_a_stage_is_lost(whole: BareCell, rank: int) -> None:
    """In the middle of decodes: the other rank serves all streams, and none notices."""
    device, tag = whole.config.cell.device, f"stage of rank {rank}"
    before = pids_of(whole)

    async def lose() -> list[Stream]:
        await asyncio.to_thread(whole.switch, "pp2", "recompute")
        client = TaskClient()
        async with client.connected(whole):
            names = submit(client, tag, ignore_eos=True)
            await client.wait_first_tokens(*names)
            await asyncio.to_thread(kill, whole, rank, before[rank])
            return await client.finish(*names)

    streams = asyncio.run(lose())
    assert [len(each.tokens) for each in streams] == [TOKENS] * STREAMS
    assert tell_pauses(tag, streams) < PAUSE_LIMIT_S[device]
    back(whole, tag)
    assert pids_of(whole)[1 - rank] == before[1 - rank], "the other one lives on"
    assert "unblock_failed" not in whole.log("worker")
    until(whole, "whole", all_serve)
    if any(each["degraded"] or each["closed"] for each in ranks_of(whole)):
        renew(whole)
    again = asyncio.run(run(whole, f"after {rank}", "pp2"))
    assert len(again) == STREAMS
