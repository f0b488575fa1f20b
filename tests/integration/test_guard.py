"""The numerical guard on real ranks: their weights are spoiled in memory while they serve.

Two ranks in fp32 that probe behind every switch. Times are printed; docs/faults.md has them.
"""

import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cells.admin import post
from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.lost_ranks import ranks_of, until
from tests.harness.faults.spoiled import spoiled, weight

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

WEIGHT = "model.layers.2.self_attn.o_proj.weight"
"""It is held as it is in the file, and every mode is a view of it."""
PROMPT = [10 + place * 37 % 4000 for place in range(40)]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    with bare_cell(
        tmp_path_factory.mktemp("guard"),
        ranks=2,
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
        limits={"probe_after_switch": True},
    ) as running:
        yield running


async def tokens_of(cell: BareCell, name: str) -> list[int]:
    client = TaskClient()
    async with client.connected(cell):
        client.submit(name, PROMPT, max_tokens=24)
        (stream,) = await client.finish(name)
    return stream.tokens


def probes(cell: BareCell) -> dict[tuple[str, int], dict[str, Any]]:
    found = cell.get("/admin/ranks")["probes"]
    return {(each["mode"], each["ranks"][0]): each for each in found}


def out(cell: BareCell) -> list[tuple[str, list[int]]]:
    return [(e["mode"], e["ranks"]) for e in cell.get("/admin/layout")["out_of_service"]]


async def test_all_modes_agree_and_probing_disturbs_nothing(cell: BareCell) -> None:
    expected = await tokens_of(cell, "in dp2")
    pages = cell.pages()
    for layout in ("tp2", "sp2", "shift2", "dp2"):
        cell.switch(layout, "reshard")
        assert await tokens_of(cell, f"in {layout}") == expected
    assert cell.pages() == pages
    found = probes(cell)
    assert set(found) == {("dp1", 0), ("dp1", 1), ("tp2", 0), ("sp2", 0)}
    assert all(each["epoch"] > 0 for each in found.values()), "each was formed by a switch"
    assert all(each["error_nats"] <= each["error_max_nats"] for each in found.values())
    took = [f"{mode} {each['took_ms']:.0f} ms" for (mode, _), each in sorted(found.items())]
    print(f"a probe took: {', '.join(took)}")
    assert out(cell) == []


async def test_a_rank_whose_weights_are_spoiled_is_found_and_left_out(cell: BareCell) -> None:
    cell.switch("dp2", "reshard")
    expected = await tokens_of(cell, "before")
    with spoiled(int(ranks_of(cell)[1]["pid"]), weight(WEIGHT)) as places:
        assert places, "the rank holds no such weight"
        cell.ask("tp2", "reshard")
        until(cell, "in dp without rank 1", lambda _: serves(cell, "dp1+off1"))
        assert sorted(out(cell)) == [("dp1", [1]), ("tp2", [0, 1])]
        assert await tokens_of(cell, "with rank 0 alone") == expected
        told = 'aileron_mode_out_of_service{mode="tp2",ranks="0-1"} 1.0'
        until(cell, "told to Prometheus", lambda _: told in metrics_of(cell))
        assert "mode_out_of_service" in cell.log("coordinator")
        assert "mode_drifts" in cell.log("worker")
    # The memory is as it was; an operator says so.
    for mode in ("tp2", "dp1"):
        status, _ = post(cell.admin + "/admin/put-back", {"mode": mode})
        assert status == 200
    until(cell, "both ranks back", lambda _: serves(cell, "dp2"))
    cell.switch("tp2", "reshard")
    assert await tokens_of(cell, "in tp2 again") == expected
    assert out(cell) == []
    status, answer = post(cell.admin + "/admin/put-back", {"mode": "tp2"})
    assert status == 400
    assert "every mode serves" in answer["error"]["message"]


def metrics_of(cell: BareCell) -> str:
    with urllib.request.urlopen(cell.admin + "/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def serves(cell: BareCell, layout: str) -> bool:
    now = cell.get("/admin/layout")
    return bool(now["serving"]) and now["layout"] == layout
