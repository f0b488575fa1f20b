"""Cells whose policy is adaptive, and what they tell of its decisions."""

from typing import Any

from coordinator.model.policy_settings import PolicySettings, PolicyStart
from coordinator.policy.step_file import parse_step_times
from tests.transcripts.cell import Cell

TIMES = parse_step_times(
    {
        "dp1": {"points": [[1, 21.6], [4096, 468]]},
        "tp2": {"points": [[1, 14.0], [4096, 295]]},
        "tp4": {"points": [[1, 9.6], [4096, 196]]},
    }
)


SETTINGS = PolicySettings(settle_ms=500, stay_ms=1_000, pin_ms=20_000)


def serving() -> Cell:
    cell = Cell("dp4", policy=PolicyStart(SETTINGS, (1, 2, 4), TIMES))
    cell.gateway()
    cell.serve()
    return cell


def wait(cell: Cell, ms: int) -> None:
    for _ in range(ms // 100):
        cell.tick(100)
        cell.settle()


def decisions(cell: Cell) -> list[dict[str, Any]]:
    found: Any = cell.core.views.decisions(50)["decisions"]
    return list(found)
