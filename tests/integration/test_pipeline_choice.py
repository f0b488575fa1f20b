"""The policy moves four real ranks to two stages of two ranks each, where that is fastest."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells.bare_cell import TaskClient
from tests.harness.cells.policy_cell import policy_cell

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

STEP_TIMES = """
dp1: {points: [[1, 60.0], [2048, 1300.0]]}
tp2: {points: [[1, 45.0], [2048, 1000.0]]}
tp4: {points: [[1, 40.0], [2048, 900.0]]}
pp2tp2: {points: [[1, 10.0], [2048, 120.0]]}
"""
"""Milliseconds, for the policy: two pairs of devices with a slow link between them."""
POLICY: dict[str, Any] = {"name": "adaptive", "decide_every_ms": 100, "stay_ms": 500}
LIMITS: dict[str, Any] = {"layout": "dp4", "pipelines": ["pp2tp2"], "widths": [1, 2, 4]}
TASKS, PROMPT_TOKENS, TOKENS = 24, 300, 60
CHOICE_LIMIT_S = 60


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(10, 4000), k=PROMPT_TOKENS)


async def test_streams_are_exact_while_the_policy_moves_them_to_stages(tmp_path: Path) -> None:
    with policy_cell(tmp_path, 4, STEP_TIMES, POLICY, LIMITS) as cell:
        client = TaskClient()
        async with client.connected(cell):
            names = [f"task-{number}" for number in range(TASKS)]
            for number, name in enumerate(names):
                client.submit(name, prompt(number), max_tokens=TOKENS, seed=number)
            deadline = time.monotonic() + CHOICE_LIMIT_S
            while (layout := cell.get("/admin/status")["layout"]) != "pp2tp2":
                assert time.monotonic() < deadline, (layout, cell.get("/admin/decisions?last=1"))
                await asyncio.sleep(0.05)
            streams = await client.finish(*names)
            found = cell.get("/admin/decisions?last=1000")["decisions"]
            for number in range(0, TASKS, 7):
                client.submit(f"calm-{number}", prompt(number), max_tokens=TOKENS, seed=number)
                (calm,) = await client.finish(f"calm-{number}")
                assert streams[number].tokens == calm.tokens
    assert all(len(each.tokens) == TOKENS for each in streams)
    assert any(each["changes"] and each["choice"].startswith("pp2tp2") for each in found)
