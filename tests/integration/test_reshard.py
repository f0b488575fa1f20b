"""Running tasks cross a switch in the next step, and who gets their pages and ranks meanwhile."""

import asyncio
import random

import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient
from tests.harness.cells.crossing import LAYOUTS, TASKS

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks-four")]


def pages_of_groups(cell: BareCell) -> list[int]:
    return [group["pages_total"] for group in cell.get("/admin/layout")["groups"]]


@pytest.mark.timeout(120)
async def test_groups_have_all_pages_after_a_move(four_ranks: BareCell) -> None:
    """They are granted what is free after the move, as ranks foresee it before: no page less."""
    wanted = {}
    for layout in LAYOUTS:
        four_ranks.switch(layout, "recompute")
        wanted[layout] = pages_of_groups(four_ranks)
    client, draw = TaskClient(), random.Random(5)
    async with client.connected(four_ranks):
        for number in range(TASKS):
            client.submit(f"page-{number}", draw.choices(range(10, 4000), k=90), max_tokens=900)
        streams = list(client.streams.values())
        while not all(stream.tokens for stream in streams):
            await asyncio.sleep(0.01)
        for layout in (*LAYOUTS, *reversed(LAYOUTS[:-1])):
            await asyncio.to_thread(four_ranks.switch, layout, "reshard")
            assert pages_of_groups(four_ranks) == wanted[layout], layout
        assert not any(stream.finished for stream in streams), "nothing was moved in the end"
        for name in client.streams:
            client.cancel(name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("origin", "wanted"), [("dp4", "tp4"), ("tp2+dp2", "tp4")])
async def test_idle_ranks_begin_new_tasks_while_a_switch_waits(
    four_ranks: BareCell, origin: str, wanted: str
) -> None:
    """Soft preempt: tasks begun meanwhile keep their tokens and go on in the group."""
    draw = random.Random(4)
    old = [draw.choices(range(10, 4000), k=40) for _ in range(2)]
    new = [draw.choices(range(10, 4000), k=50) for _ in range(3)]
    tag = f"{origin}-{wanted}"
    four_ranks.switch(origin, "recompute")
    client = TaskClient()
    async with client.connected(four_ranks):

        async def tasks(turn: str, *, is_switched: bool) -> list[list[int]]:
            for number, prompt in enumerate(old):
                client.submit(f"{tag}-{turn}-old-{number}", prompt, max_tokens=100, seed=number)
            streams = [client.streams[name] for name in client.streams if f"{turn}-old" in name]
            while not all(stream.tokens for stream in streams):
                await asyncio.sleep(0.005)
            if is_switched:
                await asyncio.to_thread(four_ranks.ask, wanted, "speculate")
            for number, prompt in enumerate(new):
                client.submit(f"{tag}-{turn}-new-{number}", prompt, max_tokens=450, temperature=0.7)
            begun = [client.streams[name] for name in client.streams if f"{turn}-new" in name]
            while is_switched and not any(len(stream.tokens) > 5 for stream in begun):
                await asyncio.sleep(0.005)
            assert not is_switched or not all(stream.finished for stream in streams)
            finished = await client.finish(*[n for n in client.streams if f"-{turn}-" in n])
            return [stream.tokens for stream in finished]

        expected = await tasks("calm", is_switched=False)
        assert await tasks("switched", is_switched=True) == expected
    record = four_ranks.record(origin, wanted)
    assert record["outcome"] == "served"
    counts = {"drain": len(old), "speculate": len(new), "reshard": len(new)}
    told = [line for line in four_ranks.log("worker").splitlines() if '"move_' in line]
    assert record["tasks"] == {**counts, "pause": 0, "recompute": 0}, told
