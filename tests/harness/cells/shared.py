"""Cells that all tests of a worker share which kill nothing: each begins and ends at rest.

At rest is: the first layout serves, no task is there, every rank has all of its pages, and every
process group that it has is one of those it began with. A cell that does not come to rest is ended,
and fails the test that left it so; the next test starts another.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from tests.harness.cells.bare_cell import BareCell
from tests.harness.cells.random_load import settle

PAUSE_LIMIT_MS = 1_000
"""Paused tasks are resumed elsewhere after so long."""
PATIENCE: dict[str, Any] = {"lease_ms": 40_000, "lost_after_ms": 45_000, "stage_limit_ms": 60_000}
"""No rank of a shared cell is cut out because the machine is busy; other tests show who is."""
GAUGES_WITHIN_S = 10.0
"""Gauges travel with a rank's heartbeat."""


class SharedCell:
    """A cell that starts for its first test."""

    def __init__(self, start: Callable[[], AbstractContextManager[BareCell]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self._cell: BareCell | None = None
        self._pages: list[dict[str, int]] = []

    @contextmanager
    def at_rest(self) -> Iterator[BareCell]:
        """Lend the cell for the length of the block, and see that it comes back to rest."""
        if self._cell is None:
            self._cell = self._stack.enter_context(self._start())
            self._pages = settle(self._cell)
        cell = self._cell
        before = len(cell.log("worker")), len(cell.log("coordinator"))
        yield cell
        try:
            assert settle(cell) == self._pages, "pages are missing"
            wait_for_process_groups(cell)
            for name, length in zip(("worker", "coordinator"), before, strict=True):
                assert "Traceback" not in cell.log(name)[length:], cell.folder
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """End it; whoever needs it next starts it anew."""
        self._cell = None
        self._stack.close()


def wait_for_process_groups(cell: BareCell) -> None:
    """Wait until every rank tells of as many process groups as it began with."""
    deadline = time.monotonic() + GAUGES_WITHIN_S
    while not all(has_its_groups(rank) for rank in cell.get("/admin/ranks")["ranks"]):
        assert time.monotonic() < deadline, cell.get("/admin/ranks")
        time.sleep(0.05)


def has_its_groups(rank: dict[str, Any]) -> bool:
    """Say whether a rank has the process groups that it began with."""
    gauges = rank["gauges"]
    return bool(gauges["process_groups"] == gauges["process_groups_at_start"])
