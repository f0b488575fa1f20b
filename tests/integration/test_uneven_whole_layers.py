"""Ranks that hold different numbers of layers whole have different numbers of KV pages.

Eight streams cross dp2 -> tp2 -> dp2 twice; fp32, so that tokens must be identical. CPU ranks pay
for whole layers with pages only in this test: see `uneven_worker`.
"""

import asyncio
from pathlib import Path

import pytest

from tests.harness.cells.bare_cell import TaskClient, bare_cell
from tests.harness.cells.log_events import events_of
from tests.harness.cells.lost_ranks import HASTY, SOON, begun, submit, tokens_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

KV_BYTES = 12 << 20
TOKENS = 120
SWITCHES = ("tp2", "dp2", "tp2", "dp2")


async def test_streams_are_exact_where_ranks_have_different_numbers_of_pages(
    tmp_path: Path,
) -> None:
    kv = ["--block-size", "32", "--kv-cache-memory-bytes", str(KV_BYTES)]
    with bare_cell(
        tmp_path,
        ranks=2,
        engine_args=["--dtype", "float32", "--max-model-len", "512", *kv],
        limits={**SOON, "weight_parts": 2, "whole_layers": (3, 0), "layout": "dp2"},
        worker="tests.harness.faults.uneven_worker",
        **HASTY,
    ) as cell:
        small, large = (each["total"] - 1 for each in cell.pages())
        assert 0 < small < large
        pages = {"dp2": [small, large], "tp2": [small]}
        client = TaskClient()
        async with client.connected(cell):
            expected = tokens_of(await client.finish(*submit(client, "calm", TOKENS)))
            names = submit(client, "switched", TOKENS)
            await begun(client, names)
            for layout in SWITCHES:
                await asyncio.to_thread(cell.switch, layout, "reshard")
                groups = cell.get("/admin/layout")["groups"]
                assert [group["pages_total"] for group in groups] == pages[layout]
                cell.pages()
            assert not all(client.streams[name].finished for name in names), "nothing has moved"
            assert tokens_of(await client.finish(*names)) == expected
        records = cell.get(f"/admin/switches?last={len(SWITCHES)}")["switches"]
        assert [record["to"] for record in records] == list(SWITCHES)
        assert all(record["tasks"]["reshard"] > 0 for record in records)
        assert sum(record["tasks"]["recompute"] for record in records) == 0
        assert not events_of(cell.log("worker"), "move_failed")
