"""The cells that a gateway knows, as far as it has heard of them, and what follows for its tasks.

A cell is *found* while the configuration or the registry names it. It is left when it drains, and
when it is dead: its session is down, and it is either no longer found or was not reached for
`dead_after_s`. One that is no longer found stays as long as its session lives, so that a registry
that is down or empty takes nothing away. Called by the relay and the fleet; pure.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.protocol.messages.gateway import CellState, PrefixesHeld
from coordinator.protocol.prefixes import SeenPrefixes
from gateway.fleet.placement import UNKNOWN_LOAD, Candidate, Needs, Spill, choose, is_open, spill

ALONE = ""
"""The cell of a gateway that was told no address."""


FORGOTTEN_AFTER_S = 300.0
"""How long a cell that is gone is still expected: if it comes back, it is told what was taken away
from it, so that it computes nothing for nobody."""


class MoveReason(StrEnum):
    """Why a task leaves the cell that it is in."""

    DEAD = "dead"
    """The cell cannot be reached, or has no rank left."""
    DRAINING = "draining"
    FULL = "full"
    """It refused the task, and another one may have room."""
    SPILL = "spill"
    """The task waited there, and another one was idle."""


@dataclass(slots=True)
class _Cell:
    is_found: bool = True
    is_up: bool = False
    down_since_s: float = 0.0
    state: CellState | None = None
    sent: int = 0
    prefixes: SeenPrefixes = field(default_factory=SeenPrefixes)


class CellRoster:
    """All known cells; a cell's name is the address of its coordinator."""

    def __init__(self, cells: Iterable[str], dead_after_s: float, *, in_fleet: bool) -> None:
        """Start with these cells; one that is not in a fleet is never left."""
        self._cells = {name: _Cell() for name in cells}
        self._dead_after_s = dead_after_s
        self.in_fleet = in_fleet

    @classmethod
    def alone(cls, address: str = ALONE) -> "CellRoster":
        """Return the roster of a gateway with one cell."""
        return cls([address], 0.0, in_fleet=False)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the cells that are known now."""
        return iter(tuple(self._cells))

    @property
    def up(self) -> list[str]:
        """The cells with a session, in order of their names."""
        return sorted(name for name, cell in self._cells.items() if cell.is_up)

    @property
    def state(self) -> CellState | None:
        """What one cell last said of itself, the one that is most likely to serve."""
        states = [self._cells[name].state for name in self.up]
        return max(
            (state for state in states if state is not None),
            key=lambda state: (state.serving and not state.draining, state.ranks_alive),
            default=None,
        )

    def found(self, cells: Collection[str], now_s: float) -> None:
        """Take the cells that the registry names; the ones that are not named may be leaving."""
        for name in cells:
            self._cells.setdefault(name, _Cell(down_since_s=now_s))
        for name, cell in self._cells.items():
            cell.is_found = name in cells

    def opened(self, name: str) -> None:
        """A session with the cell began."""
        if (cell := self._cells.get(name)) is not None:
            cell.is_up, cell.state, cell.sent = True, None, 0
            cell.prefixes.clear()

    def closed(self, name: str, now_s: float) -> None:
        """The session with the cell ended."""
        if (cell := self._cells.get(name)) is not None:
            cell.is_up, cell.state, cell.down_since_s = False, None, now_s

    @property
    def are_open(self) -> bool:
        """Whether there is a cell that tasks may be sent to."""
        return any(is_open(self._candidate(name, cell, 0)) for name, cell in self._cells.items())

    def said(self, name: str, message: CellState | PrefixesHeld) -> bool:
        """Take what a cell says of itself; say whether tasks may come or must go since."""
        cell = self._cells.get(name)
        if cell is None:
            return False
        if isinstance(message, PrefixesHeld):
            cell.prefixes.came(message.hashes)
            return False
        was_open = is_open(self._candidate(name, cell, 0))
        if cell.state is None or cell.state.load != message.load:
            cell.sent = 0
        cell.state = message
        return was_open != is_open(self._candidate(name, cell, 0))

    def sent(self, name: str, prefixes: Sequence[int]) -> None:
        """A task with such a prompt goes to the cell."""
        if (cell := self._cells.get(name)) is not None:
            cell.sent += 1
            # The cell will say so to all gateways; the next request here may come before.
            cell.prefixes.came(prefixes)

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

    def left(self, now_s: float) -> dict[str, MoveReason]:
        """Return the cells that tasks must not stay in, each with the reason."""
        if not self.in_fleet:
            return {}
        reasons = {name: self._why_left(cell, now_s) for name, cell in self._cells.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def forget(self, in_use: Collection[str], now_s: float) -> list[str]:
        """Forget cells that are long gone and have no tasks any more; return their names."""
        gone = [
            name
            for name, cell in self._cells.items()
            if not (cell.is_found or cell.is_up or name in in_use)
            and now_s - cell.down_since_s >= FORGOTTEN_AFTER_S
        ]
        for name in gone:
            del self._cells[name]
        return gone

    def _why_left(self, cell: _Cell, now_s: float) -> MoveReason | None:
        if cell.is_up:
            state = cell.state
            if state is None or (state.ranks_alive and not state.draining):
                return None
            return MoveReason.DRAINING if state.draining else MoveReason.DEAD
        is_dead = not cell.is_found or now_s - cell.down_since_s >= self._dead_after_s
        return MoveReason.DEAD if is_dead else None

    def _refuses(self, needs: Needs, cells: Sequence[Candidate]) -> str | None:
        """Return who refuses a task that is too long for every cell: it knows what to say."""
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
