"""vLLM adapter: a rank's access to its peers for migrations: their mailboxes and KV memory.

On CPU both lie in memory that the cell shares. Each rank maps them alone, whenever it starts, and
serving ranks have already mapped what a new process will use. On CUDA the ranks that start together
exchange handles, in a collective.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import structlog
import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group

from comm_pool.cpu.cell_memory import CellMemory, clear, kv_name, mailbox_name
from comm_pool.layout import Rank
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.group_directory import GroupDirectory
from kvadaptor.transfer.mailbox import MAILBOX_BYTES, RankMailbox, open_mailboxes
from kvadaptor.transfer.move_stats import MoveStats
from kvadaptor.transfer.movers import PeerMover, make_mover
from kvadaptor.transfer.peers import PeerMap, gather_all, map_peers
from kvadaptor.transfer.rounds import Finish, Mover, Round
from kvadaptor.views import KVBuffer
from worker.engine.lasting_kv import LastingKV
from worker.engine.lost_kv import inherited_pages
from worker.spec import RankSpec

log = structlog.get_logger()


def all_ranks(is_so: bool) -> bool:
    """Return whether it is so on all ranks that start together, which must all ask."""
    return all(gather_all(is_so, get_world_group().cpu_group).values())


class AfterStores:
    """A mover whose copies wait for those from the rank's pages to host memory."""

    def __init__(self, mover: Mover, order_stores: Callable[[], None]) -> None:
        self._mover, self._order_stores = mover, order_stores

    @property
    def is_one_sided(self) -> bool:
        """See `Mover`."""
        return self._mover.is_one_sided

    def warm(self, units: int) -> None:
        """See `Mover`."""
        self._mover.warm(units)

    def move(self, copies: Round, finest: Split) -> MoveStats:
        """See `Mover`."""
        return self.start(copies, finest)()

    def start(
        self, copies: Round, finest: Split, launched: Callable[[], None] = lambda: None
    ) -> Finish:
        """See `Mover`."""
        self._order_stores()
        return self._mover.start(copies, finest, launched)


Peers = tuple[dict[Rank, RankMailbox], Mover]


def take_kv(
    memory: CellMemory,
    rank: Rank,
    geometry: PageGeometry,
    directories: Iterable[GroupDirectory],
    num_bytes: int,
) -> torch.Tensor:
    """Return a rank's own KV memory, (num_bytes,) int8: zeros, and inherited pages.

    Until `directories` were opened others could read what the predecessor had in it.
    """
    mapped = memory.map(kv_name(rank), num_bytes)
    pages, page_bytes = inherited_pages(directories, rank).tolist(), geometry.layer_page_bytes
    layer_bytes = num_bytes // geometry.num_layers
    ends = [*(page * page_bytes for page in pages), layer_bytes]
    for layer in range(0, num_bytes, layer_bytes):
        first = 0
        for end in ends:
            if first < end:
                clear(mapped, layer + first, layer + end)
            first = end + page_bytes
    return torch.frombuffer(mapped, dtype=torch.int8)


def lasting_kv(spec: RankSpec, geometry: PageGeometry, device: torch.device) -> LastingKV | None:
    """Return what holds a rank's KV memory; None if it ends with its process, or on CPU."""
    if spec.lasting is None:
        return None
    of_cell, cpu_group = (spec.rank, spec.cell_ranks), get_world_group().cpu_group
    is_trusted = not spec.crashed
    return LastingKV(spec.lasting, *of_cell, geometry, device, cpu_group, is_trusted=is_trusted)


def shared_peers(memory: CellMemory, rank: Rank, world: int, kv: KVBuffer) -> Peers:
    """Map the mailboxes and KV of all ranks of the cell; clears its own mailbox."""
    own = memory.map(mailbox_name(rank), MAILBOX_BYTES)
    clear(own)
    others = [Rank(each) for each in range(world) if each != rank]
    mailboxes = {rank: RankMailbox(own)}
    mailboxes |= {
        each: RankMailbox(memory.map(mailbox_name(each), MAILBOX_BYTES, is_own=False))
        for each in others
    }
    raws: dict[int, torch.Tensor] = {rank: kv.raw}
    num_bytes = kv.raw.numel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it is read-only, which is the point
        for each in others:
            mapped = memory.map(kv_name(each), num_bytes, is_own=False)
            raws[each] = torch.frombuffer(mapped, dtype=torch.int8)
    return mailboxes, PeerMover(rank, raws, kv.geometry)


def open_peers(
    rank: Rank,
    first: Rank,
    world: int,
    kv: KVBuffer,
    *,
    peer_access: bool = True,
    map_all: Callable[[torch.Tensor, Any], PeerMap] = map_peers,
) -> Peers:
    """Open the mailboxes and KV of the `world` ranks from `first` on, which started together.

    A collective of them. The mover numbers ranks from `first`.
    """
    of_world = get_world_group()
    opened = open_mailboxes(rank - first, partial(_gather, of_world.cpu_group, world))
    mailboxes = {Rank(each): mailbox for each, mailbox in enumerate(opened, first)}
    mover, refusal = make_mover(
        kv.raw,
        kv.geometry,
        cpu_group=of_world.cpu_group,
        device_group=of_world.device_group,
        peer_access=peer_access,
        map_all=map_all,
    )
    if refusal is not None:
        log.warning(
            "kv_not_mapped", reason=refusal, instead=f"{type(mover).__name__}, through the host"
        )
    return mailboxes, mover


def _gather(group: Any, world: int, own: Any) -> Sequence[Any]:
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, own, group=group)
    return everyone
