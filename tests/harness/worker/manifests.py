"""Manifests of ranks with a few pages and tasks."""

import msgspec
import numpy as np

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import Binding, Target, TaskId, Tier
from kvadaptor.geometry import PageGeometry
from worker.rank.migration.manifest import Ints, Manifest, TaskSnapshot
from worker.rank.task_state import CachedChain, RunningState

PAGES = 12
BLOCK = 16
GEOMETRY = PageGeometry(1, 4, 8, 8, 4, BLOCK)
EPOCH = 9


def ints(*numbers: int) -> Ints:
    return np.array(numbers, dtype=np.int64)


def binding(*ranks: int) -> Binding:
    mode = Mode.DP if len(ranks) == 1 else Mode.TP
    return Binding(Group(tuple(map(Rank, ranks)), mode), EPOCH)


def target(*groups: tuple[int, ...]) -> Target:
    return Target(tuple(binding(*ranks) for ranks in groups))


def cargo(name: str, blocks: Ints, computed: int, tier: Tier = Tier.STANDARD) -> TaskSnapshot:
    header = TaskHeader(TaskId(name), "gateway", "tcp://nowhere", 10, 10, tier)
    hashes = [f"{name}/{number}".encode() for number in range(computed // BLOCK)]
    tokens = msgspec.msgpack.encode([1, 2, 3])
    state = RunningState(name, tokens, 3, computed, computed, blocks, hashes, None)
    return TaskSnapshot(header, 1, 3, b"", state)


def dp(
    rank: int,
    *led: TaskSnapshot,
    chains: tuple[CachedChain, ...] = (),
    num_pages: int = PAGES,
) -> Manifest:
    """A rank alone with all its pages but the last two, which are nobody's."""
    none = np.zeros(0, dtype=np.int32)
    pages, free = np.arange(1, num_pages - 2), ints(num_pages - 2, num_pages - 1)
    return Manifest(rank, (rank,), 3, pages, none, free, {}, num_pages, led, chains)


def tp(ranks: tuple[int, ...], *led: TaskSnapshot, shift: int = 0) -> dict[int, Manifest]:
    """A wide group that has leased three pages of each rank under indices 1, 2 and 3."""
    made = {}
    for place, rank in enumerate(ranks):
        width = len(ranks)
        pages = np.arange(1, 4) + shift * place
        slots = np.full(PAGES * width, -1, dtype=np.int32)
        slots[width : 4 * width] = (pages[:, None] * width + np.arange(width)).reshape(-1)
        free = np.setdiff1d(np.arange(1, PAGES), pages)
        mine = led if place == 0 else ()
        made[rank] = Manifest(rank, ranks, 5, pages, slots, free, {}, PAGES, mine)
    return made
