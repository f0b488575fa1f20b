"""Which cell gets a task, and which queued tasks a busy cell should give to an idle one.

A task goes to the least loaded cell that can hold it, or to one that knows the beginning of its
prompt and is not much busier. A gateway's knowledge of a cell is as old as the cell's last message,
so it adds the tasks it has sent since. After the scorers of the Gateway API Inference Extension,
with a bound in place of weights. Called by the roster. Pure.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coordinator.protocol.messages.gateway import CellLoad
from coordinator.protocol.terms import TaskId, Tier

AFFINITY_LOAD_MAX = 0.25
"""A cell that knows the prompt may exceed the lowest load by this fraction of its capacity."""

LOAD_STEP = 0.05
"""Loads that differ by less count as equal: they are not known more exactly."""

SPILLED_TASKS_MAX = 16
"""Most queued tasks that one gateway takes from one cell at a time."""

UNKNOWN_LOAD = CellLoad(queued=(), running=0, tasks_max=0, blocks_free=0, blocks_total=0)


@dataclass(frozen=True, slots=True)
class Needs:
    """The properties of a task that placement needs."""

    task: TaskId
    tier: Tier
    context_tokens_max: int
    """Most tokens whose KV the task may need."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cell as a gateway sees it now."""

    name: str
    is_up: bool
    """Whether it has a session that has reported its state."""
    is_draining: bool
    is_serving: bool
    """Whether some of its ranks serve a layout now."""
    ranks_alive: int
    context_tokens_max: int
    """Its largest context; 0 is unknown."""
    load: CellLoad
    sent: int = 0
    """Tasks sent to it since it reported a new load."""
    matched_blocks: int = 0
    """How many of the prompt's first blocks it knows."""


def is_open(cell: Candidate) -> bool:
    """Return whether tasks may be sent to a cell at all."""
    return cell.is_up and not cell.is_draining and cell.ranks_alive > 0


def can_hold(cell: Candidate, needs: Needs) -> bool:
    """Return whether a cell may get this task."""
    limit = cell.context_tokens_max
    return is_open(cell) and (not limit or needs.context_tokens_max <= limit)


def load_for(cell: Candidate, tier: Tier) -> float:
    """Return a cell's load for a task of this tier: 1 is full, and above that tasks queue.

    Queued tasks of lower tiers do not count, because they wait after it. A shortage of KV counts
    like a shortage of places.
    """
    load = cell.load
    ahead = sum(load.queued[: tier + 1])
    places = (load.running + ahead + cell.sent) / max(load.tasks_max, 1)
    used = 1 - load.blocks_free / load.blocks_total if load.blocks_total else 0.0
    return max(places, used)


def choose(needs: Needs, cells: Sequence[Candidate]) -> str | None:
    """Return the cell for a task; None if no cell can take it now."""
    fit = [cell for cell in cells if can_hold(cell, needs)]
    # A cell that switches or starts will serve soon; a serving one begins at once.
    fit = [cell for cell in fit if cell.is_serving] or fit
    if not fit:
        return None
    loads = {cell.name: load_for(cell, needs.tier) for cell in fit}
    least = min(loads.values())
    known = [
        cell
        for cell in fit
        if cell.matched_blocks and loads[cell.name] <= least + AFFINITY_LOAD_MAX
    ]
    if known:
        most = max(cell.matched_blocks for cell in known)
        known = [cell for cell in known if cell.matched_blocks == most]
    among = known or fit
    least = min(loads[cell.name] for cell in among)
    same = [cell.name for cell in among if loads[cell.name] < least + LOAD_STEP]
    # So that gateways that see equal loads do not all choose the first cell.
    return preferred(needs.task, same)


def preferred(who: str, cells: Collection[str]) -> str:
    """Return one of these cells, the same for `who` while it is among them."""
    return max(cells, key=lambda name: hashlib.blake2b(f"{who} {name}".encode()).digest())


@dataclass(frozen=True, slots=True)
class Spill:
    """Queued tasks that one cell should give to another."""

    busy: str
    idle: str
    tasks: int


def spill(cells: Collection[Candidate]) -> list[Spill]:
    """Return which cells with a queue should give tasks to cells with room and no queue.

    Each idle cell is offered once, with half of its room: other gateways see it as well.
    """
    queued = {cell.name: sum(cell.load.queued) for cell in cells if cell.is_up}
    spills = []
    for idle in sorted(cells, key=lambda cell: cell.name):
        room = idle.load.tasks_max - idle.load.running - idle.sent
        if not is_open(idle) or not idle.is_serving or queued[idle.name] or room <= 0:
            continue
        busy = max(queued, key=lambda name: (queued[name], name))
        tasks = min(queued[busy], -(-room // 2), SPILLED_TASKS_MAX)
        if tasks:
            spills.append(Spill(busy, idle.name, tasks))
            queued[busy] -= tasks
    return spills
