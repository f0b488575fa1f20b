"""Which cell a task goes to, and what queued tasks a busy cell should give to an idle one.

The least loaded cell that can hold the task gets it; one that has seen the beginning of its prompt
gets it instead, as long as it is not much busier. What one gateway sees of a cell is as old as the
cell's last message, so tasks that it has sent since count as well. After the scorers of the Gateway
API Inference Extension, with a bound in place of weights. Called by the roster. Pure.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coordinator.protocol.messages.gateway import CellLoad
from coordinator.protocol.terms import TaskId, Tier

AFFINITY_LOAD_MAX = 0.25
"""A cell that knows the prompt may be so much busier than the idlest, in parts of what it holds."""

LOAD_STEP = 0.05
"""Loads that differ by less are the same: what is known of them is no more exact."""

SPILLED_TASKS_MAX = 16
"""Most queued tasks that one gateway takes from one cell at a time."""

UNKNOWN_LOAD = CellLoad(queued=(), running=0, tasks_max=0, blocks_free=0, blocks_total=0)


@dataclass(frozen=True, slots=True)
class Needs:
    """What is known of a task that is to be placed."""

    task: TaskId
    tier: Tier
    context_tokens_max: int
    """Tokens whose KV it may need before it ends."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cell as a gateway sees it now."""

    name: str
    is_up: bool
    """There is a session with it."""
    is_draining: bool
    is_serving: bool
    """Some of its ranks serve a layout now."""
    ranks_alive: int
    context_tokens_max: int
    """Its largest context; 0 is unknown."""
    load: CellLoad
    sent: int = 0
    """Tasks that were sent to it since it told its load."""
    matched_blocks: int = 0
    """How many of the prompt's first blocks it has seen."""


def is_open(cell: Candidate) -> bool:
    """Say whether tasks may be sent to a cell at all."""
    return cell.is_up and not cell.is_draining and cell.ranks_alive > 0


def can_hold(cell: Candidate, needs: Needs) -> bool:
    """Say whether a cell may get this task."""
    limit = cell.context_tokens_max
    return is_open(cell) and (not limit or needs.context_tokens_max <= limit)


def load_for(cell: Candidate, tier: Tier) -> float:
    """Return how busy a cell is for a task of this tier: 1 is full, more than that is a queue.

    Queued tasks of lower tiers do not count, because they wait behind it. KV that is short counts
    like places that are short.
    """
    load = cell.load
    ahead = sum(load.queued[: tier + 1])
    places = (load.running + ahead + cell.sent) / max(load.tasks_max, 1)
    used = 1 - load.blocks_free / load.blocks_total if load.blocks_total else 0.0
    return max(places, used)


def choose(needs: Needs, cells: Sequence[Candidate]) -> str | None:
    """Return the cell for a task; None if no cell can have it now."""
    fit = [cell for cell in cells if can_hold(cell, needs)]
    # One that switches or starts serves soon, and any that serves now is sooner.
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
    # Gateways that see the same cells equally busy do not all choose the first one.
    return preferred(needs.task, same)


def preferred(who: str, cells: Collection[str]) -> str:
    """Return one of these cells, the same one as long as it is among them."""
    return max(cells, key=lambda name: hashlib.blake2b(f"{who} {name}".encode()).digest())


@dataclass(frozen=True, slots=True)
class Spill:
    """Queued tasks that one cell should give to another."""

    busy: str
    idle: str
    tasks: int


def spill(cells: Collection[Candidate]) -> list[Spill]:
    """Return which cells with a queue should give of it to cells that have room and no queue.

    Each idle cell is offered to once, and half of its room: other gateways see it as well.
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
