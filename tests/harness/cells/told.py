"""What a gateway tells the cells of a test that it has measured."""

from collections.abc import Sequence

from coordinator.protocol.metrics_wire import OWN, Family, Measure, Measures
from tests.harness.cells.gateway_cell import SEEN_S, FakeCell


class Told:
    """What cells are told from a moment on."""

    def __init__(self, cells: Sequence[FakeCell]) -> None:
        self._cells = cells
        self._before = [_newest(cell) for cell in cells]

    @classmethod
    async def begin(cls, cells: Sequence[FakeCell]) -> "Told":
        """Begin when what was measured before has been told."""
        for cell in cells:
            cell.seen.clear()
        await cells[0].until(lambda: any(len(_heard(cell)) >= 2 for cell in cells), SEEN_S)
        return cls(cells)

    def grown(self, measure: Measure, *labels: str) -> list[float]:
        """How much each cell was told: a count, or how often a histogram was added to.

        `labels` are those of one series; without them all are added up.
        """
        return [
            _amount(_newest(cell), measure, labels) - _amount(before, measure, labels)
            for cell, before in zip(self._cells, self._before, strict=True)
        ]


def _heard(cell: FakeCell) -> list[dict[str, Family]]:
    """The gateway's own measures in each message that the cell got."""
    messages = [message for message in list(cell.seen) if isinstance(message, Measures)]
    found = [{each.name: each for each in message.families} for message in messages]
    return [each for each in found if each.keys() & OWN.keys()]


def _newest(cell: FakeCell) -> dict[str, Family]:
    heard = _heard(cell)
    return heard[-1] if heard else {}


def _amount(families: dict[str, Family], measure: Measure, labels: tuple[str, ...]) -> float:
    series = families[measure.name].series if measure.name in families else ()
    wanted = [each for each in series if not labels or each.labels == labels]
    return sum(sum(each.counts) if measure.bounds else each.value for each in wanted)
