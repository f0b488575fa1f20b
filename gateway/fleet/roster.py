"""The cells a gateway knows, their last reported state, and which of them tasks must leave.

A cell is *found* while the configuration or the registry names it. Tasks leave a cell that drains
or is dead. A cell is dead if no rank is alive, or if its session is down and it is either no longer
found or has been down for `dead_after_s`. A cell that is no longer found stays while its session is
up, so a registry that is down or empty removes nothing. Called by the relay and the fleet; pure.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from comm_pool.layout import LayoutError, Rank, parse_layout
from coordinator.protocol.messages.gateway import CellState, PrefixesHeld
from coordinator.protocol.prefixes import PrefixHistory
from gateway.fleet.placement import UNKNOWN_LOAD, Candidate, Needs, Spill, choose, is_open, spill

ALONE = ""
"""The cell of a gateway without a configured address."""


FORGOTTEN_AFTER_S = 300.0
"""How long a lost cell is remembered: if it comes back, it gets the Cancels of tasks that were
moved away, so that it does not compute them in vain."""


class MoveReason(StrEnum):
    """Why a task leaves its cell."""

    DEAD = "dead"
    """The cell does not respond, or has no rank alive."""
    DRAINING = "draining"
    FULL = "full"
    """It refused the task, and another one may have room."""
    SPILL = "spill"
    """The task was queued there, and another cell was idle."""


@lru_cache(maxsize=256)
def group_of(layout: str, world: int, leader: Rank) -> str:
    """Return the name of the group that a rank leads, such as `tp2`; empty if it leads none."""
    try:
        groups = parse_layout(layout, world, range(1, world + 1)).groups
    except LayoutError:
        return ""
    return next((group.name for group in groups if group.leader == leader), "")


@dataclass(slots=True)
class _Cell:
    is_found: bool = True
    is_up: bool = False
    down_since_s: float = 0.0
    state: CellState | None = None
    sent: int = 0
    prefixes: PrefixHistory = field(default_factory=PrefixHistory)


class CellRoster:
    """All known cells; a cell's name is the address of its coordinator."""

    def __init__(self, cells: Iterable[str], dead_after_s: float, *, in_fleet: bool) -> None:
        """Start with these cells; tasks never leave a cell that is not in a fleet."""
        self._cells = {name: _Cell() for name in cells}
        self._dead_after_s = dead_after_s
        self.in_fleet = in_fleet

    @classmethod
    def alone(cls, address: str = ALONE) -> "CellRoster":
        """Return the roster of a gateway with one cell."""
        return cls([address], 0.0, in_fleet=False)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the known cells."""
        return iter(tuple(self._cells))

    @property
    def up(self) -> list[str]:
        """The cells with a session, sorted by name."""
        return sorted(name for name, cell in self._cells.items() if cell.is_up)

    @property
    def state(self) -> CellState | None:
        """The last reported state of the cell that is most likely to serve."""
        states = [self._cells[name].state for name in self.up]
        return max(
            (state for state in states if state is not None),
            key=lambda state: (state.serving and not state.draining, state.ranks_alive),
            default=None,
        )

    def state_of(self, name: str) -> CellState | None:
        """Return the last reported state of a cell."""
        cell = self._cells.get(name)
        return None if cell is None else cell.state

    def found(self, cells: Collection[str], now_s: float) -> None:
        """Record the cells that the registry names, and that the others are no longer found."""
        for name in cells:
            self._cells.setdefault(name, _Cell(down_since_s=now_s))
        for name, cell in self._cells.items():
            cell.is_found = name in cells

    def opened(self, name: str) -> None:
        """Record that a session with the cell began."""
        if (cell := self._cells.get(name)) is not None:
            cell.is_up, cell.state, cell.sent = True, None, 0
            cell.prefixes.clear()

    def closed(self, name: str, now_s: float) -> None:
        """Record that the session with the cell ended."""
        if (cell := self._cells.get(name)) is not None:
            cell.is_up, cell.state, cell.down_since_s = False, None, now_s

    @property
    def are_open(self) -> bool:
        """Whether there is a cell that tasks may be sent to."""
        return any(is_open(self._candidate(name, cell, 0)) for name, cell in self._cells.items())

    def update(self, name: str, message: CellState | PrefixesHeld) -> bool:
        """Record a cell's message; return whether the cell has opened or closed for tasks."""
        cell = self._cells.get(name)
        if cell is None:
            return False
        if isinstance(message, PrefixesHeld):
            cell.prefixes.remember(message.hashes)
            return False
        was_open = is_open(self._candidate(name, cell, 0))
        if cell.state is None or cell.state.load != message.load:
            cell.sent = 0
        cell.state = message
        return was_open != is_open(self._candidate(name, cell, 0))

    def sent(self, name: str, prefixes: Sequence[int]) -> None:
        """Record that a task with these prompt hashes goes to the cell."""
        if (cell := self._cells.get(name)) is not None:
            cell.sent += 1
            # The cell will report it to all gateways; the next request may arrive earlier.
            cell.prefixes.remember(prefixes)

    def choose(
        self, needs: Needs, prefixes: Sequence[int], without: Collection[str] = ()
    ) -> str | None:
        """Return the cell for a task, None if there is none now."""
        if not self.in_fleet:
            return next(iter(self._cells))
        cells = [
            self._candidate(name, cell, cell.prefixes.matched(prefixes))
            for name, cell in self._cells.items()
            if name not in without
        ]
        return choose(needs, cells) or self._refuses(needs, cells)

    def spills(self) -> list[Spill]:
        """Return which cells should give queued tasks to others."""
        if not self.in_fleet:
            return []
        return spill([self._candidate(name, cell, 0) for name, cell in self._cells.items()])

    def evacuations(self, now_s: float) -> dict[str, MoveReason]:
        """Return the cells that tasks must leave, each with the reason."""
        if not self.in_fleet:
            return {}
        reasons = {name: self._evacuation_reason(cell, now_s) for name, cell in self._cells.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def forget(self, in_use: Collection[str], now_s: float) -> list[str]:
        """Forget cells that are long gone and have no tasks; return their names."""
        gone = [
            name
            for name, cell in self._cells.items()
            if not (cell.is_found or cell.is_up or name in in_use)
            and now_s - cell.down_since_s >= FORGOTTEN_AFTER_S
        ]
        for name in gone:
            del self._cells[name]
        return gone

    def _evacuation_reason(self, cell: _Cell, now_s: float) -> MoveReason | None:
        if cell.is_up:
            state = cell.state
            if state is None or (state.ranks_alive and not state.draining):
                return None
            return MoveReason.DRAINING if state.draining else MoveReason.DEAD
        is_dead = not cell.is_found or now_s - cell.down_since_s >= self._dead_after_s
        return MoveReason.DEAD if is_dead else None

    def _refuses(self, needs: Needs, cells: Sequence[Candidate]) -> str | None:
        """Return the cell that refuses a task too long for every cell, with the right error."""
        small = [cell for cell in cells if cell.is_up and not cell.is_draining]
        if not small or any(not cell.context_tokens_max for cell in small):
            return None
        largest = max(small, key=lambda cell: (cell.context_tokens_max, cell.name))
        is_too_long = needs.context_tokens_max > largest.context_tokens_max
        return largest.name if is_too_long else None

    @staticmethod
    def _candidate(name: str, cell: _Cell, matched: int) -> Candidate:
        state = cell.state
        return Candidate(
            name,
            is_up=cell.is_up and state is not None,
            is_draining=state is not None and state.draining,
            is_serving=state is not None and state.serving,
            ranks_alive=state.ranks_alive if state is not None else 0,
            context_tokens_max=state.max_context_tokens if state is not None else 0,
            load=(state.load if state is not None else None) or UNKNOWN_LOAD,
            sent=cell.sent,
            matched_blocks=matched,
        )
