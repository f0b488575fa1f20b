"""Tasks of a killed rank go on from the KV that its memory still holds."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells.admin import post
from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.gauges import all_there, settled_total, total
from tests.harness.cells.lost_ranks import longest_pauses
from tests.harness.vllm.reshard_cases import vllm_settings
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

BLOCK_TOKENS = 32
PROMPT_TOKENS = 200
STREAMS = 16
TOKENS = 120
MOVE_TOKENS = 400
PIPELINES = ["pp2", "pp4", "pp2tp2"]
SUMMARY = "summary"

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.8, "seed": 6, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.8, "seed": 7, "regex": "([a-z]{2,9} ){99}"},
    {"temperature": 0.0, "regex": "([A-Z][a-z]{2,9}, ){99}"},
    {"temperature": 0.9, "seed": 8},
    {"temperature": 0.9, "seed": 9},
)
"""The last two have one prompt, as a request with n = 2."""
PLAIN = KINDS[:4]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    with cell_of(2, tmp_path_factory.mktemp("lost")) as running:
        yield running


@pytest.fixture(scope="module")
def cell_of_four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    with cell_of(4, tmp_path_factory.mktemp("lost-of-four")) as running:
        yield running


@pytest.fixture(scope="module")
def cell_of_stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Its random model has layers that four stages divide."""
    model, folder = (tmp_path_factory.mktemp(name) for name in ("model", "lost-stages"))
    options = {"model": model_of("four-layers", model), "limits": {"pipelines": PIPELINES}}
    with cell_of(4, folder, **options) as running:
        yield running


def cell_of(ranks: int, folder: Path, **options: Any) -> AbstractContextManager[BareCell]:
    arguments = ["--dtype", "float32", "--max-model-len", "1024"]
    return bare_cell(folder, ranks=ranks, engine_args=arguments, **options)


def prompt(name: str) -> list[int]:
    return random.Random(name).choices(range(10, 4000), k=PROMPT_TOKENS)


def submit(client: TaskClient, tag: str, number: int, *, before: str = "") -> str:
    """Send a request of the kind that this number has; returns its name."""
    kind = KINDS[number % len(KINDS)]
    twin = number - 1 if kind is KINDS[-1] else number
    name = f"{tag}-{number}"
    settings = vllm_settings(kind)
    client.submit(before + name, prompt(f"{tag}-{twin}"), max_tokens=TOKENS, **settings)
    return name


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        *(("dp2", 1), ("tp2", 1), ("tp2", 0), ("sp2", 0)),
        pytest.param("dp2", 0, marks=pytest.mark.chaos),
        pytest.param("sp2", 1, marks=pytest.mark.chaos),
    ],
)
async def test_no_full_block_is_computed_again(
    cell: BareCell, layout: str, victim: int, record_property: Any
) -> None:
    record_property(SUMMARY, await kill_under_streams(cell, layout, victim))


@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.chaos)])
async def test_a_wide_group_loses_a_member(
    cell_of_four: BareCell, victim: int, record_property: Any
) -> None:
    record_property(SUMMARY, await kill_under_streams(cell_of_four, "tp4", victim))


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        pytest.param("pp4", 3, id="first stage"),
        pytest.param("pp4", 1, id="third stage", marks=pytest.mark.chaos),
        pytest.param("pp4", 0, id="last stage", marks=pytest.mark.chaos),
        pytest.param("pp2tp2", 3, id="one of two of the first", marks=pytest.mark.chaos),
        pytest.param("pp2tp2", 1, id="one of two of the last"),
    ],
)
async def test_a_pipeline_group_loses_a_stage(
    cell_of_stages: BareCell, layout: str, victim: int, record_property: Any
) -> None:
    record_property(SUMMARY, await kill_under_streams(cell_of_stages, layout, victim))


@pytest.mark.chaos
@pytest.mark.parametrize("victim", [2, 0], ids=["second stage", "last stage"])
async def test_a_stage_stands_still(
    cell_of_stages: BareCell, victim: int, record_property: Any
) -> None:
    record_property(SUMMARY, await stop_under_streams(cell_of_stages, "pp4", victim))


@pytest.mark.parametrize("layout", ["pp2+pp2", pytest.param("tp2+pp2", marks=pytest.mark.chaos)])
async def test_a_pipeline_group_goes_on_with_tasks_of_a_lost_group(
    cell_of_stages: BareCell, layout: str, record_property: Any
) -> None:
    await all_there(cell_of_stages)
    leader = 2
    hits = await settled_total(cell_of_stages, "lost_hits", leader)
    record_property(SUMMARY, await kill_under_streams(cell_of_stages, layout, 0))
    assert await settled_total(cell_of_stages, "lost_hits", leader) > hits


@pytest.mark.parametrize(
    ("layout", "victim"), [("tp2", 1), pytest.param("dp2", 0, marks=pytest.mark.chaos)]
)
async def test_a_rank_stands_still(
    cell: BareCell, layout: str, victim: int, record_property: Any
) -> None:
    record_property(SUMMARY, await stop_under_streams(cell, layout, victim))


async def stop_under_streams(cell: BareCell, layout: str, victim: int) -> str:
    """Its process lives and still writes the step that it is in, and others read its memory."""
    pid = cell.get("/admin/ranks")["ranks"][victim]["pid"]
    stop, go_on = (partial(send, number=number) for number in (signal.SIGSTOP, signal.SIGCONT))
    try:
        return await kill_under_streams(cell, layout, victim, kill=stop, revive=go_on)
    finally:
        go_on(pid)


def send(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


async def kill_under_streams(
    cell: BareCell,
    layout: str,
    victim: int,
    kill: Callable[[int], None] = send,
    revive: Callable[[int], None] = lambda _: None,
) -> str:
    """Kill a rank under all kinds of streams; check what they get and what is computed again."""
    await all_there(cell)
    cell.switch(layout, "recompute")
    client = TaskClient()
    async with client.connected(cell):
        others = [rank for rank in range(cell.config.cell.ranks) if rank != victim]
        hits = await settled_total(cell, "lost_hits", *others)
        tag = f"{layout}-{victim}"
        names = [submit(client, tag, number) for number in range(STREAMS)]
        await until_all(client, names, 30)
        known = {name: len(client.streams[name].tokens) for name in names}
        kill(pid := cell.get("/admin/ranks")["ranks"][victim]["pid"])
        streams = await client.finish(*names)
        is_alone = layout != "dp2" and "+" not in layout
        moved = names if is_alone else [n for n in names if client.streams[n].resumed]
        assert moved, "no stream was on the lost rank"
        # All but the last token is looked up, and no stream has fewer tokens than then.
        full = sum(map(full_tokens, (PROMPT_TOKENS + known[name] - 1 for name in moved)))
        # The second of two streams with one prompt may find that on the device by then.
        full -= STREAMS // len(KINDS) * full_tokens(PROMPT_TOKENS)
        # More where the lost rank is back early, and tasks move to it and load once more.
        assert await total(cell, "lost_hits", hits + full) - hits >= full
        revive(pid)
        await all_there(cell)
        for number, (name, stream) in enumerate(zip(names[: len(KINDS)], streams, strict=False)):
            submit(client, tag, number, before="calm-")
            (alone,) = await client.finish(f"calm-{name}")
            assert stream.tokens == alone.tokens, KINDS[number]
        return f"lost rank {victim} of {layout}: {max(longest_pauses(streams)):.2f} s"


def full_tokens(tokens: int) -> int:
    """Return how many of these tokens fill blocks."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize(
    "delay_ms", [8, *(pytest.param(each, marks=pytest.mark.chaos) for each in (1, 4, 12, 20))]
)
async def test_a_rank_is_killed_while_a_switch_moves_its_tasks(
    cell: BareCell, delay_ms: int, record_property: Any
) -> None:
    """Its tasks go on from what the move has not overwritten: all of it, with pages to spare."""
    victim = delay_ms % 2
    await all_there(cell)
    cell.switch("dp2", "recompute")
    computed = await settled_total(cell, "computed_tokens", 1 - victim)
    client = TaskClient()
    async with client.connected(cell):
        names = [f"move-{delay_ms}-{number}" for number in range(STREAMS)]
        for number, name in enumerate(names):
            client.submit(name, prompt(name), max_tokens=MOVE_TOKENS, **PLAIN[number % len(PLAIN)])
        await until_all(client, names, 30)
        pid = cell.get("/admin/ranks")["ranks"][victim]["pid"]
        asked = asyncio.create_task(
            asyncio.to_thread(
                post, cell.admin + "/admin/layout", {"layout": "tp2", "carry": "reshard"}
            )
        )
        await asyncio.sleep(delay_ms / 1000)
        known = {name: len(client.streams[name].tokens) for name in names}
        os.kill(pid, signal.SIGKILL)
        streams = await client.finish(*names)
        await asked
        lost = [name for name in names if client.streams[name].resumed]
        there = sum(PROMPT_TOKENS + known[name] for name in lost)
        ideal = STREAMS * (PROMPT_TOKENS + MOVE_TOKENS) - there
        # The rank may be back before the streams end, and counts from 0.
        await all_there(cell)
        now = await settled_total(cell, "computed_tokens", 0, 1)
        again = now - computed - ideal
        pause_s = max(longest_pauses(streams))
        record_property(
            SUMMARY,
            f"killed {delay_ms} ms after the switch was asked for: {len(lost)} tasks lost, about "
            f"{again} tokens computed again, pause {pause_s:.2f} s",
        )
        assert lost
        assert again < len(names) * (BLOCK_TOKENS + 2)
        for number in range(0, STREAMS, len(PLAIN)):
            client.submit(f"calm-{names[number]}", prompt(names[number]), max_tokens=MOVE_TOKENS)
        for number in range(0, STREAMS, len(PLAIN)):
            (alone,) = await client.finish(f"calm-{names[number]}")
            assert streams[number].tokens == alone.tokens


async def until_all(client: TaskClient, names: list[str], tokens: int) -> None:
    while min(len(client.streams[name].tokens) for name in names) < tokens:
        await asyncio.sleep(0.005)
