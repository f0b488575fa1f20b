"""Ranks that may choose hold the same layers whole, also after one of them restarts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.lost_ranks import HASTY, SOON, back, kill, pids_of, submit, tokens_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

GOAL_MS = 0.05
"""Half of it lasts less than the loans of half a layer of the demo model on any host."""


def whole_of(cell: BareCell) -> list[int]:
    return [rank["weights"]["whole_layers"] for rank in cell.get("/admin/ranks")["ranks"]]


def answers(cell: BareCell, tag: str) -> list[list[int]]:
    async def asked() -> Any:
        client = TaskClient()
        async with client.connected(cell):
            return tokens_of(await client.finish(*submit(client, tag, 40)))

    return asyncio.run(asked())


def test_ranks_choose_alike_and_a_restart_keeps_the_choice(tmp_path: Path) -> None:
    limits = {**SOON, "weight_parts": 2, "whole_layers": "auto", "layout": "dp2"}
    with bare_cell(
        tmp_path,
        ranks=2,
        engine_args=["--dtype", "float32", "--max-model-len", "256"],
        limits=limits,
        slo={"interactive": {"tpot_ms": GOAL_MS}},
        **HASTY,
    ) as cell:
        first = whole_of(cell)
        assert first[0] == first[1] > 0
        for rank in cell.get("/admin/ranks")["ranks"]:
            kept = rank["weights"]["borrowing_bytes"]
            assert kept["whole_layers"] > 0
            assert {name: rank["memory"][name] for name in kept} == kept
        assert cell.get("/admin/decisions?last=1")["borrowing_bytes"] == kept
        expected = answers(cell, "before")
        kill(cell, 1, pids_of(cell)[1])
        back(cell, "rank 1")
        assert whole_of(cell) == first
        assert answers(cell, "after") == expected
        cell.switch("tp2", "reshard")
        assert answers(cell, "wide") == expected
