"""What gateways are told of their cell, and when; called by the core. Pure."""

from comm_pool.layout import format_layout
from coordinator.protocol.messages import CellState
from coordinator.switcher import Switcher
from coordinator.task_pool import TaskPool


class CellTeller:
    """Remembers what gateways were told last, and says when there is news."""

    __slots__ = ("_made_of", "told")

    def __init__(self) -> None:
        self.told: CellState | None = None
        self._made_of = (-1, False)
        """What that was made of, as far as it does not wait for a tick."""

    def news(
        self, switcher: Switcher, pool: TaskPool, world: int, *, is_tick: bool
    ) -> CellState | None:
        """Return what changed; the length of the queue alone is told only now and then."""
        known = (switcher.version, bool(switcher.served_layout.groups))
        if self.told is not None and not is_tick and known == self._made_of:
            return None
        self._made_of = known
        queued = self.told.queued if self.told and not is_tick else len(pool.tasks.queue)
        cell = CellState(
            layout=format_layout(switcher.target.layout, world),
            epoch=switcher.epoch,
            serving=bool(switcher.served_layout.groups and switcher.alive),
            world=world,
            ranks_alive=len(switcher.alive),
            queued=queued,
            max_context_tokens=pool.context_tokens_max,
        )
        if cell == self.told:
            return None
        self.told = cell
        return cell
