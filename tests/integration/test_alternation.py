"""Batch work alternates between two stages for prompts and tp2 for decodes, on real ranks."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.protocol.terms import Tier
from tests.harness.cells.admin import get_json
from tests.harness.cells.bare_cell import BareCell, TaskClient
from tests.harness.cells.policy_cell import policy_cell

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

STEP_TIMES = """
tp2: {points: [[1, 20.0], [2048, 640.0]]}
pp2: {points: [[1, 38.0], [2048, 140.0]]}
"""
"""Milliseconds of ranks with slow memory and a slow link, for the policy; these here differ."""
POLICY: dict[str, Any] = {
    "name": "adaptive",
    "decide_every_ms": 100,
    "stay_ms": 500,
    "switches_per_minute_max": 60,
}
LIMITS: dict[str, Any] = {"layout": "tp2", "pipelines": ["pp2"], "widths": [1, 2]}
PENDING, PROMPT_TOKENS, TOKENS = 48, 400, 60
PHASE_LIMIT_S = 60


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(10, 4000), k=PROMPT_TOKENS)


def params(number: int) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "temperature": 0.8 * (number % 2), "seed": number}


def alternation(cell: BareCell) -> dict[str, Any]:
    found: dict[str, Any] = get_json(cell.admin + "/admin/decisions?last=1")["alternation"]
    return found


def fill(client: TaskClient) -> None:
    """Keep as much batch work waiting as a cycle needs: how fast it ends depends on the machine."""
    pending = sum(not stream.finished for stream in client.streams.values())
    first = len(client.streams)
    for number in range(first, first + PENDING - pending):
        client.submit(f"batch-{number}", prompt(number), tier=Tier.BATCH, **params(number))


async def until_phase(cell: BareCell, client: TaskClient, phase: str) -> None:
    deadline = time.monotonic() + PHASE_LIMIT_S
    while (found := await asyncio.to_thread(alternation, cell))["phase"] != phase:
        assert time.monotonic() < deadline, f"no phase {phase}: {found}"
        fill(client)
        await asyncio.sleep(0.02)


async def test_streams_are_exact_while_their_cell_alternates(
    tmp_path: Path, record_property: Any
) -> None:
    """An interactive request ends it in the middle of prompts; it begins again afterwards."""
    with policy_cell(tmp_path, 2, STEP_TIMES, POLICY, LIMITS) as cell:
        client = TaskClient()
        async with client.connected(cell):
            fill(client)
            await until_phase(cell, client, "decode")
            await until_phase(cell, client, "prefill")
            names = list(client.streams)
            asked_s = time.monotonic()
            client.submit("urgent", prompt(-1), tier=Tier.INTERACTIVE, max_tokens=4)
            await client.wait_first_tokens("urgent")
            first_s = time.monotonic() - asked_s
            streams = await client.finish(*names, "urgent")
            seen = alternation(cell)
            switches = cell.get("/admin/switches?last=50")["switches"]
            for number in range(0, len(names), 7):
                client.submit(f"calm-{number}", prompt(number), **params(number))
                (calm,) = await client.finish(f"calm-{number}")
                assert streams[number].tokens == calm.tokens
    pairs = [(each["from"], each["to"], each["carry"]) for each in switches]
    assert pairs.count(("tp2", "pp2", "pause")) >= 2
    assert pairs.count(("pp2", "tp2", "reshard")) >= 2
    assert all(len(each.tokens) == TOKENS for each in streams[:-1])
    assert not any(each.resumed for each in streams)
    assert seen["cycles"] >= 2
    assert seen["requests"] > 0
    assert seen["single_seconds"] > 0
    record_property(
        "summary",
        f"{seen['cycles']} cycles in {sum(seen['seconds'].values()):.1f} s, "
        f"{seen['seconds'].get('switching', 0):.1f} s of it switches; an interactive request among "
        f"prompts had its first token after {first_s:.2f} s",
    )
