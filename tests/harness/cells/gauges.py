"""What ranks count, as the admin API shows it."""

import asyncio
import time

from tests.harness.cells.bare_cell import BareCell

REPORT_LIMIT_S = 5.0


def gauges(cell: BareCell) -> list[dict[str, int]]:
    """Return each rank's gauges."""
    return [rank["gauges"] for rank in cell.get("/admin/ranks")["ranks"]]


async def total(cell: BareCell, name: str, at_least: int = 0) -> int:
    """Return the sum of a gauge over the ranks, once reports have brought it that far."""
    deadline = time.monotonic() + REPORT_LIMIT_S
    while True:
        found = sum(each.get(name, 0) for each in gauges(cell))
        if found >= at_least or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


async def settled_total(cell: BareCell, name: str, *ranks: int) -> int:
    """Return the sum of a gauge over these ranks, once their last reports have come."""
    await asyncio.sleep(0.5)
    found = gauges(cell)
    return sum(found[rank].get(name, 0) for rank in ranks)


async def all_there(cell: BareCell) -> None:
    """Wait until all ranks can be used."""
    while not all(rank.get("available") for rank in cell.get("/admin/ranks")["ranks"]):
        await asyncio.sleep(0.1)
