"""A lost rank's next process starts as soon as the others have shown that they serve on."""

import time
from pathlib import Path

import pytest

from tests.harness.cells.bare_cell import bare_cell
from tests.harness.cells.log_events import events_of
from tests.harness.cells.lost_ranks import all_serve, kill, pids_of, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

TOGETHER_MS = 60_000
"""How long a launcher waits for ranks that may end with the lost one."""
SOON_S = 20.0


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_lost_rank_does_not_wait_for_ranks_that_serve_on(tmp_path: Path, layout: str) -> None:
    with bare_cell(
        tmp_path,
        ranks=2,
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
        limits={"layout": layout, "stuck_after_ms": TOGETHER_MS},
    ) as cell:
        began_s = time.monotonic()
        kill(cell, 1, pids_of(cell)[1])
        until(cell, "back", all_serve)
        assert time.monotonic() - began_s < SOON_S
        (ended,) = events_of(cell.log("worker"), "rank_exited")
        assert ended["starts_in_s"] > SOON_S, "it would have waited for that long"
