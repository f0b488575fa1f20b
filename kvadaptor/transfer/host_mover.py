"""Moves units between devices without access to each other, through memory of the host.

Each rank has staging memory that its peers map, two halves for each of them. The owner copies units
from its device into a half while the peer copies the other half into its own, so both directions of
each device's link are busy. Counters beside the staging order that. Nobody needs a collective,
which would go through the host as well (NCCL: 24 GB/s each way, a copy engine 50).
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from kvadaptor.fence import FENCE
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.transfer.boxes import BoxCopier, Boxes, Copying, make_box_copier, register
from kvadaptor.transfer.grid import Grid, grid_of, own_part, stats_of
from kvadaptor.transfer.move_stats import MoveStats
from kvadaptor.transfer.peer_processes import PeerProcesses
from kvadaptor.transfer.peers import (
    PeerMappingError,
    allocate,
    attempt,
    gather_all,
    map_peers,
    refusal_of,
)
from kvadaptor.transfer.rounds import Finish, MoveError, Round, Units
from kvadaptor.transfer.unit_copy import make_copier

STAGING_BYTES = 256 << 20
"""Staging memory of a rank, for all of its peers."""

HALVES = 2
COUNTER_BYTES = 4_096
POLL_S = 0.00002
LOOK_S = 0.01
"""How often a rank that waits for peers looks whether they have ended."""

Counters = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Staging:
    """The staging memory of one rank as this process sees it."""

    owner: int
    raw: torch.Tensor
    """Counters, and then the halves of each peer, (bytes,) int8."""
    world: int

    @property
    def filled(self) -> Counters:
        """How many pieces the owner has ever copied for each rank, (world,)."""
        return self._counters[: self.world]

    @property
    def emptied(self) -> Counters:
        """How many pieces of each rank the owner has ever taken, (world,)."""
        return self._counters[self.world :]

    @property
    def _counters(self) -> Counters:
        counters: Counters = self.raw[: 16 * self.world].numpy().view(np.int64)
        return counters

    @property
    def half_bytes(self) -> int:
        """Bytes of a half."""
        room = int(self.raw.numel()) - COUNTER_BYTES
        return room // ((self.world - 1) * HALVES) // 4096 * 4096

    def address(self, peer: int, piece: int) -> int:
        """Return where a piece for a peer lies."""
        place = (peer - (peer > self.owner)) * HALVES + piece % HALVES
        return int(self.raw.data_ptr()) + COUNTER_BYTES + place * self.half_bytes


class _Flow(Protocol):
    """The units of a round between this rank and one peer, in one direction."""

    peer: int

    def advance(self) -> bool:
        """Do what can be done now; return whether all is over."""

    def end(self) -> None:
        """Wait for the copies under way, and begin no other: the peer has ended."""


@dataclass(slots=True)
class _Pieces:
    """What both directions have in common."""

    mover: "HostMover"
    peer: int
    units: Units
    grid: Grid
    quota: int
    """Units of a piece."""
    first: int
    """The number of the first piece, counted over all rounds."""
    started: int = 0
    ended: int = 0
    copying: deque[Copying] = field(default_factory=deque)

    @property
    def count(self) -> int:
        """Pieces of this round."""
        return -(-int(self.units.size) // self.quota)

    @property
    def is_over(self) -> bool:
        """Whether all pieces were copied."""
        return self.ended == self.count

    def copy(self, staging: Staging, peer: int, copier: BoxCopier, *, outward: bool) -> None:
        """Launch the copy of the next piece, out of the own memory or into it."""
        grid = self.grid
        units = self.units[self.started * self.quota :][: self.quota]
        address = staging.address(peer, self.first + self.started)
        own = self.mover.boxes(grid, units)
        offsets = np.arange(units.size, dtype=np.uint64) * np.uint64(grid.whole_bytes)
        staged = Boxes(offsets + np.uint64(address), grid.unit_bytes, 1, on_device=False)
        sides = (own, staged) if outward else (staged, own)
        self.copying.append(copier.copy(*sides, grid.unit_bytes, grid.slots.layers))
        self.started += 1

    def end(self) -> None:
        """See `_Flow`."""
        while self.copying:
            self.end_copies()
            time.sleep(POLL_S)

    def end_copies(self) -> bool:
        """Count the copies that are over; return whether there are any."""
        before = self.ended
        while self.copying and self.copying[0].is_over():
            self.copying.popleft()
            self.ended += 1
        return self.ended > before


@dataclass(slots=True)
class _Outward(_Pieces):
    """Units that a peer gets."""

    def advance(self) -> bool:
        mover, own = self.mover, self.mover.own
        if self.end_copies():
            with FENCE:
                own.filled[self.peer] = self.first + self.ended
        emptied = mover.staging[self.peer].emptied[own.owner]
        if self.started < self.count and self.first + self.started - emptied < HALVES:
            self.copy(own, self.peer, mover.outward, outward=True)
        return self.is_over


@dataclass(slots=True)
class _Inward(_Pieces):
    """Units that come from a peer."""

    def advance(self) -> bool:
        mover, own = self.mover, self.mover.own
        if self.end_copies():
            with FENCE:
                own.emptied[self.peer] = self.first + self.ended
        theirs = mover.staging[self.peer]
        if self.started < self.count and theirs.filled[own.owner] > self.first + self.started:
            with FENCE:
                pass
            self.copy(theirs, own.owner, mover.inward, outward=False)
        return self.is_over


class HostMover:
    """See the module. Ranks without a part in a round need not call."""

    is_one_sided = False

    def __init__(
        self,
        raw: torch.Tensor,
        geometry: PageGeometry,
        own: int,
        staging: Mapping[int, Staging],
        processes: PeerProcesses,
    ) -> None:
        """`staging` is that of all ranks, by rank, of which `own` is this one."""
        self._raw, self._geometry = raw, geometry
        self._processes = processes
        self.staging, self.own = staging, staging[own]
        self.outward, self.inward = (make_box_copier(raw.device, priority=-1) for _ in range(2))
        self._copier = make_copier(geometry.num_layers, raw.device)
        self._sent = [0] * len(staging)
        self._taken = [0] * len(staging)

    def warm(self, units: int) -> None:
        """Prepare for the copies within this rank of units of this size."""
        grid = grid_of(self._geometry, Split(1, units))
        self.quota(grid)
        self._copier.warm(self._raw, grid.unit_bytes, grid.count(self._raw))

    def start(
        self, copies: Round, finest: Split, launched: Callable[[], None] = lambda: None
    ) -> Finish:
        """Move all of a round; it is over when this returns."""
        launched()
        stats = self.move(copies, finest)
        return lambda: stats

    def move(self, copies: Round, finest: Split) -> MoveStats:
        """Send other ranks' units and receive this rank's; all ranks of the round must call it.

        Raises `MoveError` for units out of range on this rank, or if the staging memory is too
        small for one unit. So it does if a peer's process ends meanwhile, once all is over between
        this rank and the others.
        """
        started = time.perf_counter()
        grid = grid_of(self._geometry, finest)
        quota = self.quota(grid)
        mine = copies.get(self.own.owner, {})
        sends, receives = own_part(copies, grid, self._raw, self.own.owner, len(self.staging))
        local = mine.get(self.own.owner)
        flows: list[_Flow] = []
        for kind, parts, counts in (
            (_Outward, sends, self._sent),
            (_Inward, receives, self._taken),
        ):
            for peer, units in parts.items():
                flow = kind(self, peer, units, grid, quota, counts[peer])
                counts[peer] += flow.count
                flows.append(flow)
        if local is not None:
            self._copier.copy([grid.between(self._raw, local, self._raw)], grid.unit_bytes)
        lost = self._run(flows)
        self._copier.finish()
        if lost:
            places = ", ".join(map(str, sorted(lost)))
            raise MoveError(
                f"of the ranks that started together, number {places} ended during the move: its "
                "tasks are computed again."
            )
        seconds = time.perf_counter() - started
        return stats_of(mine, self.own.owner, grid.whole_bytes, seconds)

    def _run(self, flows: list[_Flow]) -> set[int]:
        """Carry out all flows but those of peers that have ended; return these."""
        lost: set[int] = set()
        looks_at = time.perf_counter() + LOOK_S
        while flows:
            flows = [flow for flow in flows if not flow.advance()]
            if (now := time.perf_counter()) >= looks_at:
                looks_at = now + LOOK_S
                lost |= {flow.peer for flow in flows if self._processes.has_ended(flow.peer)}
                for flow in flows:
                    if flow.peer in lost:
                        flow.end()
                flows = [flow for flow in flows if flow.peer not in lost]
            time.sleep(POLL_S)
        return lost

    def quota(self, grid: Grid) -> int:
        """Return the number of units of a piece."""
        quota = self.own.half_bytes // grid.whole_bytes
        if quota < 1:
            raise MoveError(
                f"{self.own.raw.numel()} bytes of staging are too few: one unit of each peer, in "
                f"two halves, is {HALVES * (len(self.staging) - 1) * grid.whole_bytes} bytes."
            )
        return quota

    def boxes(self, grid: Grid, units: Units) -> Boxes:
        """Return units of the own memory."""
        blocks = grid.blocks(self._raw, units).astype(np.uint64)
        addresses = blocks * np.uint64(grid.unit_bytes) + np.uint64(self._raw.data_ptr())
        pitch = self._geometry.layer_page_bytes
        pages = self._raw.numel() // self._geometry.page_bytes
        return Boxes(addresses, pitch, pages, on_device=self._raw.device.type == "cuda")


def connect(
    raw: torch.Tensor, geometry: PageGeometry, cpu_group: Any, *, staging_bytes: int = STAGING_BYTES
) -> tuple[HostMover | None, str | None]:
    """Return a mover, or why there is none, which all ranks get alike; a collective."""
    own, world = dist.get_rank(cpu_group), dist.get_world_size(cpu_group)
    memory = allocate(COUNTER_BYTES + staging_bytes, torch.device("cpu"))
    mapped = map_peers(memory, cpu_group)
    if mapped.refusal is not None:
        return None, mapped.refusal
    staging = {rank: Staging(rank, each, world) for rank, each in mapped.memory.items()}
    pids = gather_all(os.getpid(), cpu_group)
    del pids[own]
    opened = attempt(lambda: PeerProcesses(pids))
    failure = opened if isinstance(opened, PeerMappingError) else None
    refusal = refusal_of(gather_all(failure, cpu_group))
    if isinstance(opened, PeerMappingError) or refusal is not None:
        return None, refusal
    if raw.device.type == "cuda":
        refusal = refusal_of(gather_all(attempt(lambda: _register(staging, own)), cpu_group))
        if refusal is not None:
            return None, refusal
    return HostMover(raw, geometry, own, staging, opened), None


def _register(staging: Mapping[int, Staging], own: int) -> None:
    for rank, each in staging.items():
        register(each.raw.data_ptr(), each.raw.numel(), is_own=rank == own)
