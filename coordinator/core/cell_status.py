"""What a cell publishes to its gateways about itself, and when. Pure; called by the core."""

from collections.abc import Sequence

from comm_pool.layout import format_layout
from coordinator.protocol.messages.gateway import CellLoad, CellState, PrefixesHeld
from coordinator.protocol.prefixes import PrefixHistory
from coordinator.protocol.terms import Tier
from coordinator.ranks.roster import Roster
from coordinator.switching.switcher import Switcher
from coordinator.tasks.placement import OpenGroup
from coordinator.tasks.task_pool import TaskPool


class CellStatusPublisher:
    """Remembers the state last published to gateways, and returns the news.

    The load of the cell and the prompts that it has seen are for gateways that know other cells.
    """

    __slots__ = ("_fresh", "_in_fleet", "_made_of", "_seen", "_world", "is_draining", "told")

    def __init__(self, world: int, *, in_fleet: bool) -> None:
        self._world = world
        self._in_fleet = in_fleet
        self._seen = PrefixHistory()
        self._fresh: dict[int, None] = {}
        """Blocks of prompts that came since the last tick, in order."""
        self.told: CellState | None = None
        self.is_draining = False
        """The cell is about to end."""
        self._made_of = (-1, False, False)
        """The inputs of `told` that do not wait for a tick."""

    def came(self, prefixes: Sequence[int]) -> None:
        """Record the prompt of a new task."""
        if self._in_fleet:
            self._seen.remember(prefixes)
            for each in prefixes:
                self._fresh.pop(each, None)
                self._fresh[each] = None

    def greeting(self) -> list[CellState | PrefixesHeld]:
        """Return the first messages to a gateway."""
        greeting: list[CellState | PrefixesHeld] = [self.told] if self.told is not None else []
        return [*greeting, PrefixesHeld(tuple(self._seen))] if self._seen else greeting

    def news(
        self,
        switcher: Switcher,
        pool: TaskPool,
        roster: Roster,
        groups: Sequence[OpenGroup] | None,
        *,
        is_tick: bool,
    ) -> list[CellState | PrefixesHeld]:
        """Return what has changed; the load is published at ticks only.

        `groups` are those that take tasks now; None repeats the load published last.
        """
        known = (switcher.version, bool(switcher.served_layout.groups), self.is_draining)
        if self.told is not None and not is_tick and known == self._made_of:
            return []
        self._made_of = known
        news: list[CellState | PrefixesHeld] = []
        if is_tick and self._fresh:
            news.append(PrefixesHeld(tuple(self._fresh)))
            self._fresh = {}
        load = self.told.load if self.told else None
        if groups is not None:
            load = _load(pool, roster, groups)
        queued = self.told.queued if self.told and not is_tick else len(pool.tasks.queue)
        cell = CellState(
            layout=format_layout(switcher.target.layout, self._world),
            epoch=switcher.epoch,
            serving=bool(switcher.served_layout.groups and switcher.alive),
            world=self._world,
            ranks_alive=len(switcher.alive),
            queued=queued,
            max_context_tokens=pool.context_tokens_max,
            draining=self.is_draining,
            load=load,
        )
        if cell != self.told:
            self.told = cell
            news.append(cell)
        return news


def _load(pool: TaskPool, roster: Roster, groups: Sequence[OpenGroup]) -> CellLoad:
    reports = [report for each in groups if (report := roster.report_of(each.leader))]
    return CellLoad(
        queued=tuple(pool.tasks.queue.count(tier) for tier in Tier),
        running=sum(pool.tasks.loads.tasks(group.leader) for group in groups),
        tasks_max=sum(group.max_tasks for group in groups),
        blocks_free=sum(report.blocks_free for report in reports),
        blocks_total=sum(report.blocks_total for report in reports),
    )
