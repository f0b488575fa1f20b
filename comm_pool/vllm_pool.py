"""vLLM adapter: every aligned group's communicators, created and warmed once at start-up.

Each is a vLLM `GroupCoordinator`: a device plane (NCCL with custom all-reduce; on CPU our own
`SharedPlane`, which can be aborted) and a control plane (the shared-memory broadcast queue, its
leader the only writer). All ranks create all groups in the order of `comm_pool.plan`; nothing is
created later (Flying Serving, Communicator Pool). `activate` makes one the group that vLLM's
parallel layers talk over.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.distributed.utils import create_tcp_store

from comm_pool.formations import Formations
from comm_pool.layout import Rank
from comm_pool.mixed import Mixed, reducing_groups
from comm_pool.plan import by_width, communicator_plan
from comm_pool.ports import LOOPBACK
from comm_pool.shared_plane import SharedPlane, map_plane

LOOPBACK_INTERFACE = "lo"

GROUP_NAMES = {"cuda": "tp", "cpu": "cell"}
"""vLLM gives custom all-reduce only to groups of the first name, and on CPU its own shared memory,
whose collectives wait for a dead member for ever, to none of the second."""

LARGE_MESSAGE_BYTES = 64 << 20
"""A prefill's all-reduce: larger than custom all-reduce takes, so NCCL does it."""

CPU_SPIN_S = 0.002
"""How long an idle follower on CPU spins on its step queue before it sleeps."""


Ranks = tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Communicator:
    """One ready group that this rank is a member of, and what it cost to make."""

    ranks: tuple[Rank, ...]
    group: GroupCoordinator
    created_ms: float
    memory_bytes: int
    plane: SharedPlane | None = None
    """What its collectives run over where they can be aborted: on CPU."""

    @property
    def width(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def rank_in_group(self) -> int:
        """This rank's place in the group; 0 is the leader."""
        return int(self.group.rank_in_group)


def _memory_bytes(device: torch.device) -> int:
    """Memory in use by this process: device memory on CUDA, resident set on CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    resident_pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(resident_pages) * os.sysconf("SC_PAGE_SIZE")


def _join_world(init_method: str, place: int, world: int, backend: str) -> None:
    """Make torch's world group, with nothing that listens on another address than loopback.

    torch binds the store of a `tcp://` method to every interface, and asks nobody who connects to
    it for anything. Gloo takes the interface of the host's name.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    port = int(init_method.rsplit(":", 1)[-1])
    listener = socket.create_server((LOOPBACK, port)) if place == 0 else None
    store = create_tcp_store(
        LOOPBACK,
        port,
        listen_socket=listener,
        world_size=world,
        is_master=place == 0,
        timeout=default_pg_timeout,
    )
    dist.init_process_group(backend, store=store, rank=place, world_size=world)


class CommunicatorPool:
    """The communicators of one rank, looked up by their ranks or by width."""

    def __init__(
        self,
        config: VllmConfig,
        *,
        rank: Rank,
        first: Rank,
        world: int,
        widths: tuple[int, ...],
        mixed: tuple[Mixed, ...],
        init_method: str,
        device: torch.device,
        progress: Callable[[int, int], None],
    ) -> None:
        """Join the world and create every group of the plan; a collective call of all its ranks.

        The `world` ranks from `first` on have been started together: all of the cell, or an aligned
        part of it that was started again. `mixed` shapes get their strided groups behind the plan;
        those have no control plane.
        """
        self._first = first
        self._formations = Formations()
        self._planes_of: dict[Ranks, tuple[SharedPlane, ...]] = {}
        backend = "nccl" if device.type == "cuda" else "gloo"
        with set_current_vllm_config(config):
            place = rank - first
            _join_world(init_method, place, world, backend)
            parallel_state.init_distributed_environment(world, place, init_method, rank, backend)
            parallel_state.initialize_model_parallel(1)
        own = parallel_state.get_tp_group()
        self._by_ranks: dict[tuple[Rank, ...], Communicator] = {
            (rank,): Communicator((rank,), own, 0.0, 0)
        }
        aligned = by_width(communicator_plan(world, widths))
        strided = reducing_groups(world, mixed)
        total = len(aligned) + len(strided)
        for done, (_, lists) in enumerate(sorted(aligned.items())):
            progress(done, total)
            made = self._create(config, lists, rank, backend, device, has_queue=True)
            self._by_ranks[made.ranks] = made
        self._mixed: dict[Mixed, Communicator] = {}
        for done, (each, lists) in enumerate(strided.items(), len(aligned)):
            progress(done, total)
            self._mixed[each] = self._create(config, lists, rank, backend, device, has_queue=False)
        progress(total, total)
        self._process_groups = self.process_groups()

    def _create(
        self,
        config: VllmConfig,
        lists: list[list[int]],
        rank: Rank,
        backend: str,
        device: torch.device,
        *,
        has_queue: bool,
    ) -> Communicator:
        started, before = time.perf_counter(), _memory_bytes(device)
        with set_current_vllm_config(config):
            group = parallel_state.init_model_parallel_group(
                lists,
                rank,
                backend,
                use_message_queue_broadcaster=has_queue,
                group_name=GROUP_NAMES[device.type],
            )
        plane = _use_shared_plane(group, self._formations) if device.type == "cpu" else None
        _release_unusable(group)
        _warm(group, device, exchanges=has_queue and device.type == "cuda")
        _release_names(group)
        if group.mq_broadcaster is not None and device.type == "cpu":
            # vLLM's readers spin for 1 s after each message: too long where ranks share cores.
            group.mq_broadcaster._spin_condition.busy_loop_s = CPU_SPIN_S
        ranks = tuple(Rank(self._first + place) for place in group.ranks)
        return Communicator(
            ranks,
            group,
            (time.perf_counter() - started) * 1e3,
            max(0, _memory_bytes(device) - before),
            plane,
        )

    def of(self, ranks: tuple[Rank, ...]) -> Communicator:
        """The communicator of exactly these ranks; KeyError if this rank has none."""
        return self._by_ranks[ranks]

    def of_width(self, width: int) -> Communicator:
        """The communicator of this rank's aligned group of that width."""
        return next(c for c in self._by_ranks.values() if c.width == width)

    def reducing(self, mixed: Mixed) -> Communicator:
        """The communicator over which this rank sums up in mixed groups of that shape."""
        return self._mixed[mixed]

    def __iter__(self) -> Iterator[Communicator]:
        """All groups that can be bound; those of mixed shapes are only parts of them."""
        return iter(self._by_ranks.values())

    def named(self) -> Iterator[tuple[str, Communicator]]:
        """Everything that was created, by the mode that needs it first."""
        yield from ((f"tp{each.width}", each) for each in self if each.width > 1)
        yield from ((str(mixed), each) for mixed, each in self._mixed.items())

    # ------------------------------------------------------------------ aborting

    @property
    def can_abort(self) -> bool:
        """Whether members come out of a collective whose peer has died.

        On CUDA they do not: NCCL's communicators can be aborted from another thread, but custom
        all-reduce spins inside a graph until its process ends.
        """
        return any(each.plane is not None for _, each in self.named())

    def enter(self, born: int) -> None:
        """This rank's collectives are those of this formation from now on."""
        self._formations.enter(born)

    def abort(self, ranks: Ranks, born: int) -> None:
        """Let the collectives of a formation of these ranks raise `PeerLostError`; any thread."""
        self._formations.abort(born)
        for plane in self._planes(ranks):
            plane.abort(born)

    def is_aborted(self, ranks: Ranks, born: int) -> bool:
        """Whether this rank or another member has aborted the formation."""
        marked = any(plane.is_aborted(born) for plane in self._planes(ranks))
        return marked or self._formations.is_aborted(born)

    def _planes(self, ranks: Ranks) -> tuple[SharedPlane, ...]:
        """Those that a formation of these ranks may use; others of its epoch have others."""
        found = self._planes_of.get(ranks)
        if found is None:
            planes = ((each.plane, each.ranks) for _, each in self.named())
            found = tuple(plane for plane, of in planes if plane and set(ranks).issuperset(of))
            self._planes_of[ranks] = found
        return found

    @staticmethod
    def process_groups() -> int:
        """Process groups that torch knows of; constant after start-up."""
        return len(dist.distributed_c10d._world.pg_map)

    @property
    def created(self) -> int:
        """Process groups that existed when start-up ended."""
        return self._process_groups


def activate(communicator: Communicator) -> None:
    """Make this the group of vLLM's tensor-parallel layers; an assignment, well under 1 µs.

    vLLM 0.32 has no public way to swap it (`_replace_active_groups` does the same for elastic EP).
    """
    parallel_state._TP = communicator.group
    if parallel_state._EP is not None:
        # Only for models with experts, whose ranks share these like everything else.
        parallel_state._EP = communicator.group


def all_to_all(group: GroupCoordinator, sent: torch.Tensor) -> torch.Tensor:
    """(k, ...) -> (k, ...): part j goes to member j, and its part for this rank comes back as j.

    On CUDA over the NCCL communicator that vLLM reduces with: torch's process group would make
    another one, which costs hundreds of MiB for good and several times the host's time per call.
    """
    received = torch.empty_like(sent)
    shared = getattr(group.device_communicator, "dist_module", None)
    if isinstance(shared, SharedPlane):
        shared.all_to_all(received, sent)
        return received
    plane = getattr(group.device_communicator, "pynccl_comm", None)
    if plane is None or plane.disabled:
        dist.all_to_all_single(received, sent, group=group.device_group)
        return received
    own = int(group.rank_in_group)
    plane.group_start()
    for peer in range(group.world_size):
        if peer != own:
            plane.send(sent[peer], peer)
            plane.recv(received[peer], peer)
    plane.group_end()
    received[own].copy_(sent[own])
    return received


def _use_shared_plane(group: GroupCoordinator, formations: Formations) -> SharedPlane:
    """Let vLLM's CPU communicator talk over a plane that can be aborted; collective."""

    def gather(own: object) -> list[Any]:
        told: list[Any] = [None] * group.world_size
        dist.all_gather_object(told, own, group=group.cpu_group)
        return told

    place, width = int(group.rank_in_group), int(group.world_size)
    plane = SharedPlane(map_plane(place, width, gather), place, width, formations)
    group.device_communicator.dist_module = plane
    return plane


def _release_unusable(group: GroupCoordinator) -> None:
    """Free the buffer of vLLM's multicast all-reduce where the device has no multicast."""
    plane = getattr(group.device_communicator, "symm_mem_comm", None)
    if plane is not None and plane.disabled and hasattr(plane, "buffer"):
        del plane.buffer


def _warm(group: GroupCoordinator, device: torch.device, *, exchanges: bool) -> None:
    """One collective of each kind that serving uses, so that the first step finds them warm.

    NCCL takes its buffers at the first message that custom all-reduce leaves to it, and others at
    the first exchange between two members.
    """
    tensor = torch.ones(64, 64, device=device)
    group.all_reduce(tensor)
    if device.type == "cuda":
        group.all_reduce(torch.zeros(LARGE_MESSAGE_BYTES // 2, dtype=torch.bfloat16, device=device))
    group.all_gather(tensor, dim=-1)
    if exchanges:
        all_to_all(group, torch.zeros(group.world_size, LARGE_MESSAGE_BYTES // 8, device=device))
    group.barrier()


def _release_names(group: GroupCoordinator) -> None:
    """Unlink the group's ring buffer, which every member has mapped by now.

    vLLM does it at the writer's clean exit; without a name nothing is left behind however a process
    ends.
    """
    group.barrier()
    queue = group.mq_broadcaster
    if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False
