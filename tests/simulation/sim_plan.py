"""Who tells what before a move, and where each task goes: small, but as strict as the real plan.

Every task gets whole pages of its own, under the lowest lease indices that no member has in use.
Tasks of a second round may be put where those of the first have been read.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from comm_pool.layout import Rank
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import Binding, Target, TaskId
from kvadaptor.pages import NULL_PAGE
from tests.simulation.sim_engine import slots_of

Ranks = tuple[Rank, ...]


@dataclass(frozen=True)
class Cargo:
    """A task with all that its next leader needs."""

    header: TaskHeader
    attempt: int
    length: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    computed: int


@dataclass(frozen=True)
class Manifest:
    """One rank's part: the group it left (`ranks` empty: none) and its pages."""

    rank: Rank
    incarnation: int
    ranks: Ranks
    formation: int
    pages: Mapping[int, int]
    """Lease index -> page in the left group; in dp both are the page."""
    free: frozenset[int]
    indices: Mapping[Ranks, frozenset[int]]
    cargo: tuple[Cargo, ...] = ()


@dataclass(frozen=True)
class Placed:
    """Where a task goes."""

    cargo: Cargo
    source: Ranks
    binding: Binding
    round: int
    indices: tuple[int, ...]
    """Lease indices of a wide group; none in dp."""
    pages: Mapping[Rank, tuple[int, ...]]

    @property
    def blocks(self) -> list[int]:
        """Its logical blocks in the new group."""
        slots = slots_of(self.binding.group.width)
        indices = self.indices or self.pages[self.binding.group.leader]
        every = [index * slots + slot for index in indices for slot in range(slots)]
        return every[: len(self.cargo.blocks)]


@dataclass(frozen=True)
class Plan:
    """What all ranks of a move derive from the same manifests."""

    bindings: tuple[Binding, ...]
    placed: tuple[Placed, ...]
    old_groups: frozenset[Ranks]
    """The groups that take part whole."""
    rounds: int
    manifests: Mapping[Rank, Manifest]


class _Room:
    """Pages of each rank that may be written, and lease indices that may be used."""

    def __init__(
        self,
        manifests: Mapping[Rank, Manifest],
        left: frozenset[Ranks],
        held: Mapping[Rank, set[int]],
    ) -> None:
        self._manifests = manifests
        self.pages = {}
        for rank, each in manifests.items():
            given_up = set(each.pages.values()) if each.ranks in left else set()
            self.pages[rank] = sorted((each.free | given_up) - held[rank])
        self._taken: dict[Ranks, set[int]] = {}

    def least(self, binding: Binding) -> int:
        return min(len(self.pages[rank]) for rank in binding.group.ranks)

    def place(self, cargo: Cargo, source: Ranks, binding: Binding, number: int) -> Placed | None:
        ranks = binding.group.ranks
        wanted = -(-len(cargo.blocks) // slots_of(len(ranks)))
        if self.least(binding) < wanted:
            return None
        pages = {rank: tuple(self.pages[rank][:wanted]) for rank in ranks}
        for rank in ranks:
            del self.pages[rank][:wanted]
        indices = self._indices(ranks, wanted) if len(ranks) > 1 else ()
        return Placed(cargo, source, binding, number, indices, pages)

    def _indices(self, ranks: Ranks, count: int) -> tuple[int, ...]:
        taken = self._taken.setdefault(
            ranks, set().union(*(self._manifests[rank].indices.get(ranks, ()) for rank in ranks))
        )
        chosen: list[int] = []
        index = 1
        while len(chosen) < count:
            if index not in taken:
                chosen.append(index)
            index += 1
        taken.update(chosen)
        return tuple(chosen)


def plan_move(manifests: Mapping[Rank, Manifest], target: Target, *, two_rounds: bool) -> Plan:
    """Place as many tasks as there is room for; with two rounds, every second one late."""
    left = whole_groups(manifests)
    bindings = tuple(each for each in target.bindings if set(each.group.ranks) <= manifests.keys())
    tasks = tasks_of(manifests, left)
    held: dict[Rank, set[int]] = {rank: set() for rank in manifests}
    for cargo, source in tasks:
        _hold(manifests, held, cargo, source)
    room = _Room(manifests, left, held)
    placed: list[Placed] = []
    late: list[tuple[Cargo, Ranks]] = []
    for number, (cargo, source) in enumerate(tasks):
        there = None if two_rounds and number % 2 else _place(room, bindings, cargo, source, 1)
        if there is None:
            late.append((cargo, source))
        else:
            placed.append(there)
    if two_rounds and late:
        after: dict[Rank, set[int]] = {rank: set() for rank in manifests}
        for cargo, source in late:
            _hold(manifests, after, cargo, source)
        for rank, pages in room.pages.items():
            # What was read in the first round is written over first.
            room.pages[rank] = [*sorted(held[rank] - after[rank]), *pages]
        for cargo, source in late:
            if there := _place(room, bindings, cargo, source, 2):
                placed.append(there)
    rounds = max((each.round for each in placed), default=0)
    return Plan(bindings, tuple(placed), left, rounds, manifests)


def _place(
    room: _Room, bindings: tuple[Binding, ...], cargo: Cargo, source: Ranks, number: int
) -> Placed | None:
    near = [each for each in bindings if set(each.group.ranks).intersection(source)]
    best = max(near, key=lambda each: (room.least(each), -each.group.leader), default=None)
    return None if best is None else room.place(cargo, source, best, number)


def whole_groups(manifests: Mapping[Rank, Manifest]) -> frozenset[Ranks]:
    """The groups all of whose members left the same formation."""
    return frozenset(
        each.ranks
        for each in manifests.values()
        if each.ranks
        and all(
            member in manifests
            and manifests[member].ranks == each.ranks
            and manifests[member].formation == each.formation
            for member in each.ranks
        )
    )


def tasks_of(
    manifests: Mapping[Rank, Manifest], left: frozenset[Ranks]
) -> list[tuple[Cargo, Ranks]]:
    """The newest attempt of each task that can move; a rank that was cut out may tell of others."""
    newest: dict[TaskId, tuple[Cargo, Ranks]] = {}
    for ranks in sorted(left):
        for cargo in manifests[ranks[0]].cargo:
            other = newest.get(cargo.header.task)
            if other is None or other[0].attempt < cargo.attempt:
                newest[cargo.header.task] = (cargo, ranks)
    return sorted(newest.values(), key=lambda each: (each[0].header.tier, each[0].header.task))


def _hold(
    manifests: Mapping[Rank, Manifest], held: dict[Rank, set[int]], cargo: Cargo, source: Ranks
) -> None:
    slots = slots_of(len(source))
    for rank in source:
        pages = manifests[rank].pages
        # A member that has given up its lease shows the null page, as a table of slots does.
        held[rank].update(pages.get(block // slots, NULL_PAGE) for block in cargo.blocks)
