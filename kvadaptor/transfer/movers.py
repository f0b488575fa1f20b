"""Carries out the unit copies of a re-shard, between the KV memory of ranks on one host.

A `PeerMover` pulls from memory that peers have mapped to each other (Triton over NVLink: 367 GB/s
on H200, against 236 GB/s for gather, NCCL send and scatter). If peers cannot map each other, a
`HostMover` copies through memory of the host. If that is not possible either, an `ExchangeMover`
sends through a process group. The result is the same. All start-up cost is in the
constructor and `warm`; a move allocates nothing that lasts. The caller orders ranks: before a round
every rank's device must have finished its steps and the previous round (`move` returns only then),
and all ranks must have synchronized on that.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.transfer.grid import NOTHING, Grid, grid_of, own_part, stats_of
from kvadaptor.transfer.host_mover import connect
from kvadaptor.transfer.move_stats import MoveStats
from kvadaptor.transfer.peers import PeerMap, map_peers
from kvadaptor.transfer.rounds import Finish, MoveError, Mover, Round, Units
from kvadaptor.transfer.unit_copy import Copier, make_copier

STAGING_BYTES = 256 << 20
"""Memory of an `ExchangeMover`: two halves used in turn, each for sending and receiving."""


def make_mover(
    raw: torch.Tensor,
    geometry: PageGeometry,
    *,
    cpu_group: Any,
    device_group: Any,
    peer_access: bool = True,
    map_all: Callable[[torch.Tensor, Any], PeerMap] = map_peers,
) -> tuple[Mover, str | None]:
    """Return the fastest mover that works, and why it is no `PeerMover`, if so; collective.

    Both groups have the same ranks in the same order: `cpu_group` of Gloo, `device_group` of NCCL
    on CUDA and of Gloo on CPU. All ranks get the same kind and the same reason. Without
    `peer_access` no rank maps the memory of another's device, with it `map_all` does.
    """
    rank, world = dist.get_rank(cpu_group), dist.get_world_size(cpu_group)
    refusal: str | None = "cell.peer_access is off"
    if world == 1:
        return PeerMover(rank, {rank: raw}, geometry), None
    if peer_access:
        mapped = map_all(raw, cpu_group)
        if mapped.refusal is None:
            return PeerMover(rank, mapped.memory, geometry), None
        refusal = mapped.refusal
    through_host, reason = connect(raw, geometry, cpu_group)
    if through_host is not None:
        return through_host, refusal
    return ExchangeMover(raw, geometry, device_group), f"{refusal}; {reason}"


class PeerMover:
    """Copies from the mapped memory of peers into its own memory."""

    is_one_sided = True

    def __init__(
        self,
        rank: int,
        memory: Mapping[int, torch.Tensor],
        geometry: PageGeometry,
        *,
        copier: Copier | None = None,
    ) -> None:
        """`memory` is that of `PeerMap`; ranks may differ in their number of pages."""
        self._rank = rank
        self._memory = memory
        self._geometry = geometry
        self._copier = copier or make_copier(geometry.num_layers, memory[rank].device)

    def warm(self, units: int) -> None:
        """Compile for this unit size, with tables for as many copies as this rank has units."""
        raw, grid = self._memory[self._rank], grid_of(self._geometry, Split(1, units))
        self._copier.warm(raw, grid.unit_bytes, grid.count(raw))

    def move(self, copies: Round, finest: Split) -> MoveStats:
        """See `Mover`."""
        return self.start(copies, finest)()

    def start(
        self, copies: Round, finest: Split, launched: Callable[[], None] = lambda: None
    ) -> Finish:
        """Begin to pull this rank's part of the round from its sources, in any order.

        Raises `MoveError` for a rank that is not mapped, or units out of range at either end.
        """
        mine = copies.get(self._rank, NOTHING)
        grid = grid_of(self._geometry, finest)
        jobs = []
        for source, pair in mine.items():
            if source not in self._memory:
                raise MoveError(f"rank {source} is not among those whose memory is mapped.")
            jobs.append(grid.between(self._memory[source], pair, self._memory[self._rank]))
        if not self._copier.is_asynchronous:
            launched()
        self._copier.copy(jobs, grid.unit_bytes)
        if self._copier.is_asynchronous:
            launched()
        return lambda: stats_of(mine, self._rank, grid.whole_bytes, self._copier.finish())


class ExchangeMover:
    """Packs units, sends them through a process group and scatters them, step by step.

    A step moves a bounded number of units per pair of ranks; while one is in flight the next is
    packed. Ranks without a part in a round need not call.
    """

    is_one_sided = False

    def __init__(
        self,
        raw: torch.Tensor,
        geometry: PageGeometry,
        group: Any,
        *,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Allocate the staging memory, of the same size on all ranks."""
        self._raw = raw
        self._geometry = geometry
        self._group = group
        self._rank: int = dist.get_rank(group)
        self._world: int = dist.get_world_size(group)
        # Two halves of two directions; regions start at multiples of any vector's width.
        self._part_bytes = staging_bytes // 4 // 4096 * 4096
        self._staging = torch.empty(4 * self._part_bytes, dtype=torch.int8, device=raw.device)
        self._copier = make_copier(geometry.num_layers, raw.device)

    def warm(self, units: int) -> None:
        """Connect all ranks to each other, and prepare to pack and scatter units of this size."""
        grid = grid_of(self._geometry, Split(1, units))
        self._quota(grid)
        # Twice all units: a round packs and scatters each at most once.
        self._copier.warm(self._raw, grid.unit_bytes, 2 * grid.count(self._raw))
        others = [rank for rank in range(self._world) if rank != self._rank]
        token = self._staging[:1], self._staging[self._part_bytes :][:1]
        for work in self._post([(rank, *token) for rank in others], 0):
            work.wait()
        self._copier.finish()

    def start(
        self, copies: Round, finest: Split, launched: Callable[[], None] = lambda: None
    ) -> Finish:
        """Run `exchange`; the round is over when this returns."""
        launched()
        stats = self.exchange(copies, finest)
        return lambda: stats

    def move(self, copies: Round, finest: Split) -> MoveStats:
        """See `exchange`."""
        return self.exchange(copies, finest)

    def exchange(self, copies: Round, finest: Split) -> MoveStats:
        """Send other ranks' units and receive this rank's; all ranks of the round must call it.

        Returns when this rank's units have arrived and those it sends have left. Raises `MoveError`
        for units out of range on this rank, or if `staging_bytes` is too small for one unit.
        """
        started = time.perf_counter()
        grid = grid_of(self._geometry, finest)
        quota = self._quota(grid)
        incoming = copies.get(self._rank, NOTHING)
        sends, receives = own_part(copies, grid, self._raw, self._rank, self._world)
        local = incoming.get(self._rank)
        if local is not None:
            self._copier.copy([grid.between(self._raw, local, self._raw)], grid.unit_bytes)
        longest = max((each.size for each in (*sends.values(), *receives.values())), default=0)
        steps = -(-longest // quota)
        under_way: list[Any] = []
        for step in range(steps + 1):
            # The next step is sent before this rank waits for the previous one.
            piece = slice(step * quota, (step + 1) * quota)
            posted = self._start(sends, receives, piece, grid) if step < steps else []
            for work in under_way:
                work.wait()
            if step:
                self._scatter(receives, piece.start - quota, grid)
            under_way = posted
        self._copier.finish()
        seconds = time.perf_counter() - started
        return stats_of(incoming, self._rank, grid.whole_bytes, seconds)

    def _quota(self, grid: Grid) -> int:
        """Return the number of units that one rank sends another in a step."""
        whole = grid.whole_bytes
        quota = self._part_bytes // (max(1, self._world - 1) * whole)
        if quota < 1:
            raise MoveError(
                f"{4 * self._part_bytes} bytes of staging are too few: one unit of each peer, in "
                f"two halves and two directions, is {4 * (self._world - 1) * whole} bytes."
            )
        return quota

    def _place(self, peer: int, at: int, count: int, grid: Grid, incoming: int) -> Any:
        """Return the staging for one peer's units in the step that starts at unit number `at`."""
        quota, whole = self._quota(grid), grid.whole_bytes
        half = at // quota % 2
        index = peer - (peer > self._rank)
        first = (2 * half + incoming) * self._part_bytes + index * quota * whole
        return self._staging[first : first + count * whole]

    def _start(
        self,
        sends: Mapping[int, Units],
        receives: Mapping[int, Units],
        piece: slice,
        grid: Grid,
    ) -> list[Any]:
        """Pack and send one step's units, and post its receives."""
        jobs = []
        messages: dict[int, list[Any]] = {}
        for incoming, by_peer in enumerate((sends, receives)):
            for peer, units in by_peer.items():
                part = units[piece]
                if not part.size:
                    continue
                place = self._place(peer, piece.start, part.size, grid, incoming)
                messages.setdefault(peer, [peer, None, None])[1 + incoming] = place
                if not incoming:
                    jobs.append(grid.packing(self._raw, part, place))
        self._copier.copy(jobs, grid.unit_bytes)
        return self._post([tuple(each) for each in messages.values()], piece.start)

    def _scatter(self, receives: Mapping[int, Units], at: int, grid: Grid) -> None:
        """Copy the units received in one step to their places."""
        jobs = []
        for peer, units in receives.items():
            part = units[at : at + self._quota(grid)]
            if part.size:
                place = self._place(peer, at, part.size, grid, 1)
                jobs.append(grid.unpacking(place, part, self._raw))
        self._copier.copy(jobs, grid.unit_bytes)

    def _post(self, messages: list[Any], tag: int) -> list[Any]:
        """Send and receive at once; `messages` are (peer, to send or None, to receive or None)."""
        operations = []
        for peer, outgoing, incoming in messages:
            # The process group numbers its ranks as the world does.
            number = dist.get_global_rank(self._group, peer)
            sides = ((dist.isend, outgoing), (dist.irecv, incoming))
            operations += [
                dist.P2POp(call, tensor, number, self._group, tag)
                for call, tensor in sides
                if tensor is not None
            ]
        return list(dist.batch_isend_irecv(operations)) if operations else []
