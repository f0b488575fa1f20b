"""vLLM adapter: every aligned group's communicators, created and warmed once at start-up.

Each is a vLLM `GroupCoordinator`: a device plane and a control plane, the step queue that only the
leader writes. On CUDA these are NCCL with custom all-reduce and vLLM's shared-memory broadcast
queue; all ranks create them together in the order of `comm_pool.plan`. On CPU they are our own
`SharedPlane` and `StepRing`, over memory that outlives a rank. Nothing is created later (Flying
Serving, Communicator Pool). `activate` selects the group that vLLM's parallel layers use.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.distributed.utils import create_tcp_store

from comm_pool.cpu.cell_memory import CellMemory, link_name, plane_name, queue_name
from comm_pool.cpu.plane_group import PlaneGroup
from comm_pool.cpu.shared_plane import SharedPlane, plane_bytes
from comm_pool.cpu.step_ring import StepRing, ring_bytes
from comm_pool.cuda.collective_abort import CollectiveAborter, SignalPump, unblock, undivided
from comm_pool.formations import Formations
from comm_pool.layout import Rank
from comm_pool.mixed import Mixed, Staged, reducing_groups
from comm_pool.plan import by_width, communicator_plan
from comm_pool.ports import LOOPBACK
from comm_pool.stages.group import StageGroup
from comm_pool.stages.links import LinkEnd, MakesLink, StageLinks

LOOPBACK_INTERFACE = "lo"

GROUP_NAME = "tp"
"""vLLM gives custom all-reduce only to groups of this name."""

LARGE_MESSAGE_BYTES = 64 << 20
"""A prefill's all-reduce: too large for custom all-reduce, so NCCL does it."""

Ranks = tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Communicator:
    """One ready group of this rank, with the time and memory that it took."""

    ranks: tuple[Rank, ...]
    group: GroupCoordinator
    created_ms: float
    memory_bytes: int
    plane: SharedPlane | None = None
    """The plane of its collectives if these can be aborted: on CPU."""
    aborter: CollectiveAborter | None = None
    """Aborts its collectives where they have no plane."""
    tp: GroupCoordinator | None = None
    """The group of vLLM's tensor-parallel layers, if that is not `group`: in pipeline groups."""
    stages: GroupCoordinator | None = None
    """The members of a pipeline group in the order of their stages; else the rank alone."""
    links: StageLinks | None = None
    """What connects this rank's stage to its neighbours."""

    @property
    def width(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def rank_in_group(self) -> int:
        """This rank's place in the group; 0 is the leader."""
        return int(self.group.rank_in_group)


def _memory_bytes(device: torch.device) -> int:
    """Return the memory in use: device memory on CUDA, this process's resident set on CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    resident_pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(resident_pages) * os.sysconf("SC_PAGE_SIZE")


def _join_world(init_method: str, place: int, world: int, backend: str) -> None:
    """Make torch's world group, listening on loopback addresses only.

    torch binds the store of a `tcp://` method to every interface, without authentication. Gloo
    would take the interface of the host's name.
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


def _be_a_world() -> None:
    """Make torch's world group, which vLLM requires, of this process alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


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
        memory: CellMemory | None = None,
        rehearses: bool = False,
    ) -> None:
        """Join the world and create every group of the plan.

        The `world` ranks from `first` on have started together, or share `memory`: all of the cell,
        or an aligned part of it that restarted. `mixed` shapes get their strided groups after the
        plan; those have no control plane. A collective call of all its ranks, except of one that
        `rehearses`: it computes alone in wide groups until it calls `join`.
        """
        self._pump = SignalPump(device)
        self.closed: tuple[Ranks, ...] = ()
        """Groups that this process can never form again."""
        self._rank = rank
        self._first = first
        self._memory = memory
        self.rehearses = rehearses
        self._formations = Formations()
        self._planes_of: dict[Ranks, tuple[SharedPlane, ...]] = {}
        self._staged: dict[Staged, Communicator] = {}
        # As vLLM's worker does: groups read it when they are made.
        parallel_state.set_custom_all_reduce(not config.parallel_config.disable_custom_all_reduce)
        with set_current_vllm_config(config):
            if memory is None:
                place, backend = rank - first, "nccl"
                _join_world(init_method, place, world, backend)
                world_size, world_rank = world, place
            else:
                backend = "gloo"
                _be_a_world()
                world_size, world_rank = 1, 0
            # What vLLM calls the local rank is the number of the device.
            place_on_host = rank if device.index is None else device.index
            parallel_state.init_distributed_environment(
                world_size=world_size,
                rank=world_rank,
                distributed_init_method=init_method,
                local_rank=place_on_host,
                backend=backend,
            )
            parallel_state.initialize_model_parallel(1)
        own = parallel_state.get_tp_group()
        self._by_ranks: dict[tuple[Rank, ...], Communicator] = {
            (rank,): Communicator((rank,), own, 0.0, 0, stages=parallel_state._PP)
        }
        aligned = by_width(communicator_plan(world, widths))
        strided = reducing_groups(world, mixed)
        total = len(aligned) + len(strided)
        for done, (_, lists) in enumerate(sorted(aligned.items())):
            progress(done, total)
            made = self._create(config, lists, device, has_queue=True)
            self._by_ranks[made.ranks] = made
        self._mixed: dict[Mixed, Communicator] = {}
        for done, (each, lists) in enumerate(strided.items(), len(aligned)):
            progress(done, total)
            self._mixed[each] = self._create(config, lists, device, has_queue=False)
        progress(total, total)
        self._process_groups = self.process_groups()

    def _create(
        self, config: VllmConfig, lists: list[list[int]], device: torch.device, *, has_queue: bool
    ) -> Communicator:
        started, before = time.perf_counter(), _memory_bytes(device)
        plane = None
        with set_current_vllm_config(config):
            if self._memory is None:
                group = self._create_together(lists, has_queue=has_queue)
            else:
                plane, group = self._create_alone(self._memory, lists, has_queue=has_queue)
        _warm(group, device, exchanges=has_queue and device.type == "cuda")
        aborter = None
        if self._memory is None:
            _release_names(group)
            aborter = CollectiveAborter(group, self._pump, lambda: self._formations.formation)
        ranks = tuple(Rank(self._first + place) for place in group.ranks)
        return Communicator(
            ranks,
            group,
            (time.perf_counter() - started) * 1e3,
            max(0, _memory_bytes(device) - before),
            plane,
            aborter,
            stages=parallel_state._PP,
        )

    def _create_together(self, lists: list[list[int]], *, has_queue: bool) -> GroupCoordinator:
        group = parallel_state.init_model_parallel_group(
            lists,
            parallel_state.get_world_group().local_rank,
            "nccl",
            use_message_queue_broadcaster=has_queue,
            group_name=GROUP_NAME,
        )
        _release_unusable(group)
        return group

    def _create_alone(
        self, memory: CellMemory, lists: list[list[int]], *, has_queue: bool
    ) -> tuple[SharedPlane, GroupCoordinator]:
        ranks = next(each for each in lists if self._rank in each)
        place, width = ranks.index(self._rank), len(ranks)
        mapped = memory.map(plane_name(ranks), plane_bytes(width))
        plane = SharedPlane(mapped, place, width, self._formations, rehearses=self.rehearses)
        queue = None
        if has_queue:
            queue = StepRing(memory.map(queue_name(ranks), ring_bytes(width)), place, width)
        return plane, PlaneGroup(ranks, self._rank, plane, queue)

    def connect_stages(
        self,
        staged: Staged,
        memory: CellMemory,
        link_bytes: int,
        make: MakesLink,
        *,
        links_tokens: bool,
    ) -> None:
        """Connect the stages of a pipeline group, which shares all but its links with that of tp.

        The ranks of a stage are an aligned group, which sums. Each link takes `link_bytes` of
        memory that the ranks share. With `links_tokens` the last stage sends to the first one, too.
        """
        whole = self.of_width(staged.width)
        above, part = divmod(whole.rank_in_group, staged.tp)
        ranks, stage = whole.ranks, staged.pp - 1 - above
        is_aborted = (whole.plane or self._formations).is_aborted

        def link(first: int, *, sends: bool) -> LinkEnd:
            mapped = memory.map(link_name(ranks, staged, first, part), link_bytes)
            return make(mapped, self._formations, is_aborted, sends=sends)

        last = staged.pp - 1
        has_tokens = links_tokens and stage in (0, last)
        links = StageLinks(
            link(stage - 1, sends=False) if stage > 0 else None,
            link(stage, sends=True) if stage < last else None,
            link(last, sends=stage == last) if has_tokens else None,
        )
        stages = StageGroup(ranks[part :: staged.tp][::-1], self._rank)
        summing = self.of_width(staged.tp).group
        self._staged[staged] = replace(whole, tp=summing, stages=stages, links=links)

    def join(self) -> None:
        """Compute together with the others in wide groups from now on."""
        self.rehearses = False
        for _, each in self.named():
            if each.plane is not None:
                each.plane.join()

    def of(self, ranks: tuple[Rank, ...]) -> Communicator:
        """Return the communicator of exactly these ranks; KeyError if this rank has none."""
        return self._by_ranks[ranks]

    def of_width(self, width: int, stages: int = 1) -> Communicator:
        """Return the communicator of this rank's aligned group of that width and stages."""
        if stages > 1:
            return self._staged[Staged(stages, width // stages)]
        return next(c for c in self._by_ranks.values() if c.width == width)

    def reducing(self, mixed: Mixed) -> Communicator:
        """Return the communicator over which this rank reduces in mixed groups of that shape."""
        return self._mixed[mixed]

    def __iter__(self) -> Iterator[Communicator]:
        """Yield all groups that can be bound; those of mixed shapes are only parts of them."""
        return iter(self._by_ranks.values())

    def named(self) -> Iterator[tuple[str, Communicator]]:
        """Yield everything that was created, by the mode that needs it first."""
        yield from ((f"tp{each.width}", each) for each in self if each.width > 1)
        yield from ((str(mixed), each) for mixed, each in self._mixed.items())

    # ------------------------------------------------------------------ aborting

    @property
    def can_abort(self) -> bool:
        """Whether collectives with a dead peer raise `PeerLostError` by themselves: on CPU.

        On CUDA `unblock` lets their kernels run to their end; if that fails, the process ends.
        """
        return any(each.plane is not None for _, each in self.named())

    def enter(self, formation: int) -> None:
        """Make this rank's collectives belong to this formation from now on."""
        self._formations.enter(formation)

    def abort(self, ranks: Ranks, formation: int) -> None:
        """Make the collectives of a formation of these ranks raise `PeerLostError`; any thread."""
        self._formations.abort(formation)
        for plane in self._planes(ranks):
            plane.abort(formation)

    def is_aborted(self, ranks: Ranks, formation: int) -> bool:
        """Return whether this rank or another member has aborted the formation.

        A rank alone waits for nobody, so its formation is never aborted, even if others of its
        epoch were lost.
        """
        if len(ranks) == 1:
            return False
        marked = any(plane.is_aborted(formation) for plane in self._planes(ranks))
        return marked or self._formations.is_aborted(formation)

    def validity(self, ranks: Sequence[Rank]) -> Callable[[], bool]:
        """Return a query for whether the present formation of these ranks was not aborted."""
        formation, members = self._formations.formation, tuple(ranks)
        return lambda: not self.is_aborted(members, formation)

    def unblock(self, ranks: Ranks, is_wanted: Callable[[], bool]) -> None:
        """Unblock this rank from the collectives of an aborted formation; any thread.

        This process can never form the group again. One call takes about 0.1 s, or until
        `is_wanted` returns false; repeat it while it is wanted. Does nothing on CPU.
        """
        for staged, each in self._staged.items():
            if staged.width == len(ranks) and each.links is not None:
                each.links.release()
        # Survivors form subgroups of the ranks next, so these stay. Only this group uses the
        # strided groups of mixed shapes across it.
        mixed = (each for shape, each in self._mixed.items() if shape.width == len(ranks))
        ways = [each.aborter for each in (self.of(ranks), *mixed) if each.aborter is not None]
        if ways:
            if ranks not in self.closed:
                self.closed = (*self.closed, ranks)
            unblock(ways, self._pump, is_wanted)

    def _planes(self, ranks: Ranks) -> tuple[SharedPlane, ...]:
        """Return the planes that a formation of these ranks may use; others of its epoch differ."""
        found = self._planes_of.get(ranks)
        if found is None:
            planes = ((each.plane, each.ranks) for _, each in self.named())
            found = tuple(plane for plane, of in planes if plane and set(ranks).issuperset(of))
            self._planes_of[ranks] = found
        return found

    @staticmethod
    def process_groups() -> int:
        """Return the number of torch's process groups; constant after start-up."""
        return len(dist.distributed_c10d._world.pg_map)

    @property
    def created(self) -> int:
        """Number of process groups at the end of start-up."""
        return self._process_groups


def activate(communicator: Communicator) -> None:
    """Make this the group of vLLM's parallel layers; a few assignments, well under 1 µs.

    vLLM 0.32 has no public way to swap it (`_replace_active_groups` does the same for elastic EP).
    """
    group = communicator.group if communicator.tp is None else communicator.tp
    parallel_state._TP = group
    if parallel_state._EP is not None:
        # Only for models with experts, which the same ranks divide like everything else.
        parallel_state._EP = group
    if communicator.stages is not None:
        parallel_state._PP = communicator.stages


def all_to_all(group: GroupCoordinator, sent: torch.Tensor) -> torch.Tensor:
    """(k, ...) -> (k, ...): part j goes to member j; member j's part for this rank is part j.

    On CUDA it uses the NCCL communicator that vLLM reduces with. torch's process group would make
    another one, which costs hundreds of MiB for good and several times the host's time per call.
    """
    received = torch.empty_like(sent)
    shared = getattr(group.device_communicator, "dist_module", None)
    if isinstance(shared, SharedPlane):
        shared.all_to_all(received, sent)
        return received
    plane = getattr(group.device_communicator, "pynccl_comm", None)
    own = int(group.rank_in_group)
    with undivided(group.device_communicator):
        if plane is None or plane.disabled:
            dist.all_to_all_single(received, sent, group=group.device_group)
            return received
        plane.group_start()
        for peer in range(group.world_size):
            if peer != own:
                plane.send(sent[peer], peer)
                plane.recv(received[peer], peer)
        plane.group_end()
    received[own].copy_(sent[own])
    return received


def _release_unusable(group: GroupCoordinator) -> None:
    """Free the buffer of vLLM's multicast all-reduce if the device has no multicast."""
    plane = getattr(group.device_communicator, "symm_mem_comm", None)
    if plane is not None and plane.disabled and hasattr(plane, "buffer"):
        del plane.buffer


def _warm(group: GroupCoordinator, device: torch.device, *, exchanges: bool) -> None:
    """Run one collective of each kind used in service, so that the first step finds them warm.

    NCCL allocates buffers at the first message that is too large for custom all-reduce, and others
    at the first exchange between two members.
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

    vLLM does it at the writer's clean exit; without a name nothing remains however a process ends.
    """
    group.barrier()
    queue = group.mq_broadcaster
    if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False
