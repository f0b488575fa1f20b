"""Four CPU ranks that are laid out by the adaptive policy: each use case switches by itself.

On two cores a tp group of CPU ranks is slower than one rank, so by its own measurements the policy
would rightly stay in dp. The cells here are given the step times of a GPU box, ten times as slow so
that few requests are a load: `policy.step_times`, which is there for any box whose measurements are
not to be believed. Loads, queues, switches and streams are real.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coordinator.model.observation import Observation
from coordinator.model.observation_log import CostRecord, decode
from coordinator.policy.replay import replay
from coordinator.protocol.terms import Tier
from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

PAGES = 24
"""Of 32 tokens: a rank alone holds less than the longest context of 1,024."""

BURST_INTERVAL_S = 0.02
"""Between the requests of a burst, which is a rate and not one heap of requests."""

LIMIT_S = 90
"""For a decision to come; it takes a second or two on a machine with nothing else to do."""

STEP_TIMES = """
dp1: {points: [[1, 40.0], [4096, 3600]]}
tp2: {points: [[1, 19.0], [4096, 2950]]}
tp4: {points: [[1, 17.0], [4096, 1960]]}
"""


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    folder = tmp_path_factory.mktemp("adaptive")
    times = folder / "step_times.yaml"
    times.write_text(STEP_TIMES)
    policy = {
        "name": "adaptive",
        "step_times": str(times),
        "observation_log": str(folder / "seen.jsonl"),
        "interactive": {"weight": 4},
        "decide_every_ms": 100,
        "stay_ms": 300,
        "settle_ms": 150,
        "caution_ms": 300,
        "pin_ms": 2_000,
        "switches_per_minute_max": 60,
    }
    with bare_cell(
        folder,
        ranks=4,
        engine_args=[
            *("--dtype", "float32", "--max-model-len", "1024"),
            *("--num-gpu-blocks-override", str(PAGES), "--max-num-seqs", "32"),
        ],
        policy=policy,
        slo={"interactive": {"ttft_ms": 1_000, "tpot_ms": 24}},
    ) as running:
        # Whatever test comes first finds what an idle cell is laid out as.
        asyncio.run(serves(running, "tp4"))
        yield running


def prompt(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(10, 4000), k=length)


def decisions(cell: BareCell) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cell.get("/admin/decisions?last=1000")["decisions"]
    return found


async def decided(
    cell: BareCell, says: Callable[[dict[str, Any]], bool], since: int
) -> dict[str, Any]:
    """Wait for a decision of the policy, behind the first `since`, to change something."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for each in (await asyncio.to_thread(decisions, cell))[since:]:
            if each["changes"] and each["cause"] == "policy" and says(each):
                return each
        await asyncio.sleep(0.05)
    changes = [each for each in decisions(cell)[since:] if each["changes"]]
    raise AssertionError((changes, decisions(cell)[-1]))


async def serves(cell: BareCell, layout: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        answer = await asyncio.to_thread(cell.get, "/admin/layout")
        if answer["serving"] and answer["layout"] == layout:
            return
        await asyncio.sleep(0.05)
    raise AssertionError((layout, answer, decisions(cell)[-2:]))


async def test_light_traffic_gets_the_widest_group(cell: BareCell) -> None:
    wide = next(each for each in decisions(cell) if each["choice"] == "tp4")
    assert wide["cause"] == "policy"
    assert "less time" in wide["reason"]
    client = TaskClient()
    async with client.connected(cell):
        client.submit("alone", prompt(1, 60), max_tokens=8)
        (stream,) = await client.finish("alone")
    assert len(stream.tokens) == 8
    switches = cell.get("/admin/switches?last=1000")["switches"]
    assert ("tp4", "policy") in [(each["to"], each["cause"]) for each in switches]


def is_apart_for_goals(decision: dict[str, Any]) -> bool:
    """For the goals of the requests there are, or of those that a little more load would bring."""
    is_for_speed = "costs" in decision["reason"]
    return "tp4" not in decision["choice"] and "goals" in decision["reason"] and not is_for_speed


async def test_a_burst_is_served_apart_and_what_follows_by_the_wide_group_again(
    cell: BareCell,
) -> None:
    await serves(cell, "tp4")
    since = len(decisions(cell))
    client = TaskClient()
    async with client.connected(cell):
        # As many as no machine serves before the layout may change again.
        names = [f"burst-{number}" for number in range(80)]
        for number, name in enumerate(names):
            client.submit(name, prompt(number, 150), max_tokens=24)
            await asyncio.sleep(BURST_INTERVAL_S)
        burst = await decided(cell, is_apart_for_goals, since)
        for stream in await client.finish(*names):
            assert len(stream.tokens) == 24
    shown = {each["layout"]: each for each in burst["candidates"] if "refused" not in each}
    assert shown[burst["choice"]]["worth"] > shown["tp4"]["worth"]
    assert burst["inputs"]["standard"]["waiting"] > 0
    await serves(cell, "tp4")


async def test_interactive_among_batch_gets_a_wide_group_for_itself(cell: BareCell) -> None:
    await serves(cell, "tp4")
    since = len(decisions(cell))
    client = TaskClient()
    async with client.connected(cell):
        names = [f"batch-{number}" for number in range(48)]
        for number, name in enumerate(names):
            client.submit(name, prompt(number, 60), tier=Tier.BATCH, max_tokens=250)

        async def ask(count: int) -> None:
            for number in range(count):
                name = f"now-{number}"
                client.submit(name, prompt(number, 40), tier=Tier.INTERACTIVE, max_tokens=24)
                await client.finish(name)

        asking = asyncio.create_task(ask(400))
        kept = await decided(cell, lambda each: "for interactive" in each["choice"], since)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for name in client.streams:
            client.cancel(name)
    layout, _, whose = kept["choice"].partition(", ")
    assert "tp" in layout
    assert whose.endswith("for interactive")
    assert {"interactive", "batch"} <= set(kept["inputs"])
    assert "goals" in kept["reason"]


async def test_a_context_that_no_rank_holds_gets_a_group_that_does(cell: BareCell) -> None:
    client = TaskClient()
    async with client.connected(cell):
        # What an operator chose is left alone for a while; then the waiting request is what counts.
        await asyncio.to_thread(cell.switch, "dp4", "recompute")
        since = len(decisions(cell))
        client.submit("long", prompt(7, 800), max_tokens=40)
        wide = await decided(cell, lambda _: True, since)
        (stream,) = await client.finish("long")
        assert len(stream.tokens) == 40
        client.submit("too long", prompt(9, 900), max_tokens=1_000)
        while not client.streams["too long"].finished:
            await asyncio.sleep(0.01)
    assert "no group holds 840 tokens" in wide["reason"], wide
    assert "tp" in wide["choice"]
    refused = client.streams["too long"].failure or ""
    assert "context_length_exceeded" in refused
    assert "the largest context here is 1024 tokens" in refused


def test_the_log_can_be_run_again(cell: BareCell) -> None:
    """As far as an idle cell has come to its layout: each look takes a while to be judged."""
    lines = [decode(line) for line in (cell.folder / "seen.jsonl").read_bytes().splitlines()]
    is_wide = [isinstance(each, Observation) and each.layout == "tp4" for each in lines]
    lines = lines[: is_wide.index(True) + 20]
    assert isinstance(lines[0], CostRecord)
    found = replay(lines, is_adaptive=True)
    assert any(each.now == "tp4" for each in found)
    assert len({each.now for each in replay(lines, is_adaptive=False, layout="dp4")}) == 1
