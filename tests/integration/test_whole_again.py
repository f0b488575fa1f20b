"""A cell whose wide group has lost a member becomes whole by itself, as soon as nobody waits."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.lost_ranks import (
    back,
    begun,
    calm_tokens,
    kill,
    ranks_of,
    submit,
    tokens_of,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IDLE_MS = 2_000


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    with bare_cell(
        tmp_path_factory.mktemp("whole"),
        ranks=2,
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
        renew_idle_ms=IDLE_MS,
    ) as running:
        yield running


def incarnations(cell: BareCell) -> list[int]:
    return [rank["incarnation"] for rank in ranks_of(cell)]


def serves_tp2(cell: BareCell) -> bool:
    view: dict[str, Any] = cell.get("/admin/layout")
    return bool(view["serving"]) and view["layout"] == "tp2"


async def test_tp2_comes_back_behind_the_loss_of_a_member(cell: BareCell) -> None:
    expected = await calm_tokens(cell)
    cell.switch("tp2", "reshard")
    first = incarnations(cell)
    client = TaskClient()
    async with client.connected(cell):
        names = submit(client, "through")
        await begun(client, names)
        await asyncio.to_thread(kill, cell, 1, ranks_of(cell)[1]["pid"])
        streams = await client.finish(*names)
    assert tokens_of(streams) == expected
    back(cell, "follower of tp2")
    took_s = await asyncio.to_thread(until, cell, "tp2 again", serves_tp2)
    print(f"tp2 serves again {took_s:.1f} s after all ranks served, with {IDLE_MS / 1e3} s idle")
    assert all(new > old for new, old in zip(incarnations(cell), first, strict=True))
    client = TaskClient()
    async with client.connected(cell):
        assert tokens_of(await client.finish(*submit(client, "again"))) == expected
    causes = [each["cause"] for each in cell.get("/admin/switches?last=20")["switches"]]
    assert "restored" in causes
    assert cell.log("worker").count("ranks_renewed") == 1
