"""Streams that cross switches between layouts by chance, with nothing computed again."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient
from tests.harness.cells.lost_ranks import begun, submit

LAYOUTS = ("dp2", "tp2", "sp2", "shift2")


def sixteen(client: TaskClient, tag: str, tokens: int) -> list[str]:
    """Ask for the same eight streams twice."""
    return [name for half in "ab" for name in submit(client, f"{tag}-{half}", tokens)]


async def cross_switches(
    cell: BareCell, client: TaskClient, names: Sequence[str], *, seed: int, switches: int
) -> tuple[list[Stream], list[dict[str, Any]]]:
    """Switch under these streams, from tp2 on, until all layouts have served.

    Returns the streams and the records of the switches. The streams outlast the switches, which
    computed nothing again.
    """
    draw, layout, visits = random.Random(seed), "tp2", set[str]()
    await begun(client, list(names))
    for _ in range(switches):
        layout = draw.choice([each for each in LAYOUTS if each != layout])
        visits.add(layout)
        await asyncio.to_thread(cell.switch, layout, "reshard")
    assert not all(client.streams[name].finished for name in names), "the streams are too short"
    streams = await client.finish(*names)
    assert visits == set(LAYOUTS)
    records = cell.get(f"/admin/switches?last={switches}")["switches"]
    assert len(records) == switches
    assert sum(record["tasks"]["recompute"] for record in records) == 0
    return streams, records
