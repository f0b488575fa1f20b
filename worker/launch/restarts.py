"""When to restart ranks whose processes ended, and which of them together. Pure.

With shared memory, each rank restarts alone and joins the others. Otherwise ranks that start
together share communicators, so members of a group that end within a moment of each other restart
as a group. A first restart waits no longer once all ranks that run have left the groups they shared
with the one that ended. If ranks hold parts of the weights, all ranks of a block end with one, and
the other blocks serve on. Restarts never stop, since the cause may pass, such as another process's
memory use. Delays grow, so that start-up costs the serving ranks next to nothing.
"""

from collections.abc import Collection, Iterable, Mapping

from comm_pool.layout import Rank
from worker.cohort import Cohort

LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
"""A process that served for longer started well: its end counts as a first failure."""

KNOWN_S = 0.5
"""After this long every rank has heard that another's process ended; it takes 30 to 200 ms."""

MOVED_S = 0.2
"""Ranks that serve on make passes within this time, or make them after a long step."""


def split(ranks: Collection[Rank], widths: Collection[int], world: int) -> list[tuple[Rank, ...]]:
    """Return the largest sets of ranks that can start together: all, else aligned groups."""
    if len(ranks) == world:
        return [tuple(sorted(ranks))]
    found: list[tuple[Rank, ...]] = []
    rest = set(ranks)
    for width in sorted({1, *widths}, reverse=True):
        for first in range(0, world, width):
            group = tuple(map(Rank, range(first, first + width)))
            if rest.issuperset(group):
                rest.difference_update(group)
                found.append(group)
    return sorted(found)


class Restarts:
    """The processes of each rank; times are seconds of one monotonic clock.

    `together_s` is the delay of a first restart; ranks that end within it restart together. With
    `shares_memory` a rank joins the others in what they prepared together; until they have, all
    restart together. The ranks of an aligned `block` cannot serve without each other: when one
    ends, the others must be ended, and they restart together.
    """

    def __init__(
        self, world: int, together_s: float, *, shares_memory: bool = False, block: int = 1
    ) -> None:
        self._world = world
        self._together_s = together_s
        self._shares_memory = shares_memory
        self.block = block
        self._running: set[Rank] = set()
        self._is_prepared = False
        """Whether a rank was ready; its whole cohort has then prepared the shared objects."""
        self._incarnations: dict[Rank, int] = {}
        self._cohorts: dict[Rank, Cohort] = {}
        self._ended: dict[Rank, int] = {}
        self._without_fault: set[Rank] = set()
        self._failures: dict[Rank, int] = {}
        self._ready_at: dict[Rank, float] = {}
        self._were_ready: set[Rank] = set()
        self._due: dict[Rank, float] = {}
        self._first_ends: dict[Rank, float] = {}
        """When ranks ended that have not failed before, until they start."""
        self._passes: tuple[float, Mapping[Rank, int]] = 0.0, {}
        """When `hasten` last looked at the main loops of the others, and how far they were."""
        self._renewed: dict[Rank, tuple[Rank, ...]] = {}
        """Ranks that are being ended, each with the ranks that it then starts with."""

    def started(self, rank: Rank, cohort: Cohort, wall_s: int) -> int:
        """Return the incarnation of a process that starts at this wall time, in seconds.

        It grows with each process, also across restarts of the launcher.
        """
        for waiting in (self._due, self._renewed, self._first_ends):
            waiting.pop(rank, None)
        self._running.add(rank)
        self._is_prepared &= cohort.joins
        self._cohorts[rank] = cohort
        self._incarnations[rank] = max(wall_s, self._incarnations.get(rank, 0) + 1)
        return self._incarnations[rank]

    def ready(self, rank: Rank, now_s: float) -> None:
        """Note that the rank's process can serve."""
        self._ready_at[rank] = now_s
        self._were_ready.add(rank)
        self._is_prepared = True

    @property
    def falls_together(self) -> bool:
        """Whether the ranks of a block cannot serve without each other."""
        return self.block > 1

    @property
    def all_were_ready(self) -> bool:
        """Whether each rank could serve at some time."""
        return len(self._were_ready) == self._world

    def record_end(self, rank: Rank) -> None:
        """Record that the rank's process ended, without scheduling a restart."""
        self._ended[rank] = self._incarnations[rank]
        if rank in self.falling():
            self._without_fault.add(rank)
        else:
            self._without_fault.discard(rank)
        self._running.discard(rank)
        self._ready_at.pop(rank, None)

    def exited(self, rank: Rank, now_s: float) -> float:
        """Note that the rank's process ended; return the delay of its restart in seconds."""
        ready_at = self._ready_at.get(rank)
        self.record_end(rank)
        was_steady = ready_at is not None and now_s - ready_at > STEADY_S
        failures = 1 if was_steady else self._failures.get(rank, 0) + 1
        self._failures[rank] = failures
        if failures == 1:
            self._first_ends[rank] = now_s
        delay_s: float = min(LONGEST_DELAY_S, self._together_s * 2 ** min(failures - 1, 20))
        block = self._block_of(rank)
        due_s = max(now_s + delay_s, *(self._due.get(each, 0.0) for each in block))
        self._due |= dict.fromkeys(block, due_s)
        return due_s - now_s

    def hasten(self, passes: Mapping[Rank, int], now_s: float) -> None:
        """Let ranks start again now if all that run have left the groups they shared with them.

        `passes` has how far the main loops of running ranks are. One that may be about to end, as
        it is still in such a group, makes no pass. Where a rank waits for longer, as it has failed
        before, those that end soon after each other still start together.
        """
        last_s, before = self._passes
        if now_s - last_s < MOVED_S:
            return
        self._passes = now_s, dict(passes)
        serving = self._running & self._ready_at.keys()
        have_moved = all(passes.get(each, 0) > before.get(each, 1 << 62) for each in serving)
        known = {rank for rank, at_s in self._first_ends.items() if last_s >= at_s + KNOWN_S}
        again = self._due.keys() - self._first_ends.keys() - self._renewed.keys()
        if serving and have_moved and not (again and not self._shares_memory):
            for rank in known:
                self._due |= dict.fromkeys(self._block_of(rank), now_s)

    def renew(self, ranks: tuple[Rank, ...], now_s: float) -> tuple[Rank, ...]:
        """Return the ranks to end for a requested restart: these and all of their blocks.

        A coordinator that has just started knows only the ranks that have reported. They start
        together when all have ended.
        """
        ranks = tuple(sorted({each for rank in ranks for each in self._aligned(rank)}))
        for rank in ranks:
            self._failures.pop(rank, None)
            self._renewed[rank] = ranks
            self._due[rank] = now_s
        return ranks

    def _block_of(self, rank: Rank) -> tuple[Rank, ...]:
        return self._renewed.get(rank) or self._aligned(rank)

    def _aligned(self, rank: Rank) -> tuple[Rank, ...]:
        first = rank - rank % self.block
        return tuple(map(Rank, range(first, first + self.block)))

    def fall_with(self, rank: Rank) -> list[Rank]:
        """Return the running ranks that cannot serve without this one, which has ended."""
        return [each for each in self._block_of(rank) if each in self._running]

    def forgive(self) -> None:
        """Forget all failures: a restart of all ranks was requested."""
        for each in (self._failures, self._due, self._renewed, self._first_ends):
            each.clear()

    def waits_for(self, rank: Rank) -> list[Rank]:
        """Return the ranks that cannot become ready without this one: they started together."""
        if rank in self._ready_at:
            return []
        peers: Iterable[Rank] = self._cohorts[rank].ranks
        return [each for each in peers if each != rank and each not in self._ready_at]

    def take_due(self, now_s: float) -> list[Rank]:
        """Return the ranks to start now: if any is due, all that are due soon."""
        due_s = self.next_due_s()
        if due_s is None or now_s < due_s:
            return []
        soon_s = now_s + self._together_s
        return sorted(rank for rank, at_s in self._startable().items() if soon_s >= at_s)

    def next_due_s(self) -> float | None:
        """Return when `take_due` next returns ranks; None if no rank waits."""
        if self._shares_memory and not self._is_prepared:
            return max(self._due.values()) if len(self._due) == self._world else None
        return min(self._startable().values(), default=None)

    def _startable(self) -> dict[Rank, float]:
        """Return the due times of ranks whose blocks have ended."""
        return {
            rank: at_s
            for rank, at_s in self._due.items()
            if self._running.isdisjoint(self._block_of(rank))
        }

    def newest(self) -> tuple[tuple[Rank, int], ...]:
        """Return the newest process of each rank, as (rank, incarnation)."""
        return tuple(sorted(self._incarnations.items()))

    def without_fault(self) -> tuple[Rank, ...]:
        """Return whose newest ended process ended on demand, or after a peer of its block."""
        return tuple(sorted(self._without_fault))

    def falling(self) -> tuple[Rank, ...]:
        """Return the running ranks that would end without fault: on demand, or after a peer."""
        return tuple(
            sorted(
                rank
                for rank in self._running
                if rank in self._renewed or not self._running.issuperset(self._aligned(rank))
            )
        )

    def ended(self) -> tuple[tuple[Rank, int], ...]:
        """Return the newest ended process of each rank, as (rank, incarnation)."""
        return tuple(sorted(self._ended.items()))
