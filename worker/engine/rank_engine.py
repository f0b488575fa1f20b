"""vLLM adapter: everything a rank prepares at start-up, one set of objects per width.

Order: communicators, replica, view trees, runners, a trial of each width's graphs, then KV. Ranks
that start together measure at the same time how much KV each has room for. Afterwards selecting a
width is two assignments: no allocation, no new process group, no collective. The tp, sp and mixed
modes of a width share all but the tree, so they can change from step to step.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog
import torch
from torch import nn
from vllm import envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.structured_output import StructuredOutputManager

from comm_pool.layout import Mode, Rank, StepMode, lease_key
from comm_pool.pool import Communicator, CommunicatorPool, activate
from kvadaptor.pages import PagePool
from kvadaptor.slot_table import SlotTable
from kvadaptor.transfer.mailbox import RankMailbox
from kvadaptor.transfer.peers import map_peers
from kvadaptor.transfer.rounds import Mover
from kvadaptor.views import LAYOUT, KVBuffer, geometry_of, whole_specs
from worker.engine.block_sources import connect_sources, open_host_pages
from worker.engine.calibrate import graph_bytes, measure_steps, settle_parts
from worker.engine.codec import RequestCodec
from worker.engine.config import ModeKey, mode_config
from worker.engine.counters import engine_totals, process_gauges
from worker.engine.device import (
    MemoryNotes,
    activation_bytes,
    freeze_objects,
    kv_budget_bytes,
    make_runner,
    prepare_process,
    used_bytes,
)
from worker.engine.host_kv import HostTier
from worker.engine.lasting_kv import lasting_bytes
from worker.engine.lasting_weights import forget_weights, predecessor_bytes
from worker.engine.lost_kv import LostKV, open_directories, open_lost_kv
from worker.engine.mode import PreparedMode
from worker.engine.peers import (
    AfterStores,
    all_ranks,
    lasting_kv,
    open_peers,
    shared_peers,
    take_kv,
)
from worker.engine.pipelines import connect_pipelines, launched
from worker.engine.probe_steps import ProbeBatch
from worker.engine.scheduling.scheduler import AsyncModeScheduler, ModeScheduler
from worker.engine.startup_cache import (
    Probes,
    StartupMeasurements,
    known_measurements,
    memory_of_measurements,
)
from worker.engine.trees import TreeBuilder
from worker.engine.weights.layers import ViewError
from worker.rank.engine import EngineFacts
from worker.rank.step_times import StepTimes, width_times
from worker.spec import RankSpec, communicator_widths, modes_widths

log = structlog.get_logger()

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) while a rank starts."""


def settle_environment() -> None:
    """Let vLLM cache its environment variables, as its own engine does: steps read them."""
    envs.enable_envs_cache()


def _keys_of(spec: RankSpec) -> tuple[ModeKey, ...]:
    """Return dp and tp of every further width, ascending, then the pipeline groups."""
    widths, pipelines = modes_widths(spec), spec.pipelines
    plain = (ModeKey(Mode.DP if width == 1 else Mode.TP, width) for width in widths)
    return (*plain, *(ModeKey(Mode.PP, each.width, each.pp) for each in pipelines))


def _of_process(spec: RankSpec) -> tuple[int, int, int, bool]:
    """Return what `prepare_process` reads of a spec."""
    return spec.rank, spec.threads, spec.ranks_per_device, spec.peer_access


class RankEngine:
    """A rank's replica, KV buffer, page accounting and prepared modes."""

    probed: Probes
    """The probe results of the start-up."""

    def __init__(self, base: VllmConfig, spec: RankSpec, progress: Progress) -> None:
        self.spec = spec
        self.base = base
        self.device = prepare_process(base, *_of_process(spec))
        notes = MemoryNotes(self.device, predecessor_bytes(spec.lasting, spec.rank))
        self._token = torch.zeros(64, device=self.device)
        self._selected: Communicator | None = None
        widths = communicator_widths(spec)
        progress("communicators", 0, max(1, len(widths) - 1 + len(spec.mixed)))
        self.communicators = CommunicatorPool(
            base,
            rank=spec.rank,
            first=spec.first,
            world=spec.world,
            widths=widths,
            mixed=spec.mixed,
            init_method=spec.init_method,
            device=self.device,
            progress=lambda done, total: progress("communicators", done, total),
            memory=spec.memory,
            rehearses=spec.joins,
        )
        connect_pipelines(self.communicators, spec, self.device)
        notes.note("communicators")
        progress("weights", 0, 1)
        self.keys = _keys_of(spec)
        borrows = spec.parts > 1 and spec.borrow != "none"
        configs = {
            key: mode_config(base, key, LAYOUT.name, borrows=borrows and key.width == 1)
            for key in self.keys
        }
        builder = TreeBuilder(base, configs, self.keys, spec, self.communicators, self.device)
        replica = builder.load()
        progress("weights", 1, 1)
        notes.note("weights")
        trees = builder.trees(replica, lambda done, total: progress("modes", done, total))
        notes.note("trees")
        freeze_objects()
        self.replica_bytes, self.view_bytes = builder.replica_bytes, builder.view_bytes
        self.loaded_bytes = builder.loaded_bytes
        """Bytes of the weights that this process has read from the checkpoint."""
        self.borrowing = builder.loan_counts()
        """What its steps borrow; None if the rank has all weights or waits alone."""
        self.other_bytes: dict[str, int] = {"context": notes.context}
        """Device memory of runners, graphs and activations, by piece."""
        runners = {key: self._build_runner(configs[key], key, trees[key]) for key in self.keys}
        self.kv = self._allocate_kv(configs, runners, progress)
        progress("kv", 1, 1)
        notes.note("graph trials and kv")
        self.mailboxes, self.mover = self._connect_peers()
        notes.note("peers")
        self.pages = PagePool(self.kv.num_pages)
        structured = StructuredOutputManager(configs[self.keys[0]])
        hasher = self._block_hasher()
        self.intake = RequestCodec(hasher, structured)
        self.host, self.lost = self._open_sources(hashes=hasher is not None)
        self.modes = {
            key: self._prepare(key, configs[key], runners[key], structured) for key in self.keys
        }
        self.probe, self.probed = ProbeBatch.of(base, self.kv.geometry.tokens_per_slot), {}
        self._warm(progress)
        notes.note("graphs and warm steps")
        if spec.parts > 1 and not builder.borrows:
            # A rank with a part of the weights computes nothing alone, so it waits for its peers.
            key = ModeKey(Mode.DP, 1)
            config = mode_config(base, key, LAYOUT.name)
            self.modes[key] = self._prepare(key, config, None, structured)
        named = sum(size for name, size in self.memory() if name not in ("context", "activations"))
        self.other_bytes["rest"] = notes.rest(named)

    # ------------------------------------------------------------------ building

    def _build_runner(
        self, config: VllmConfig, key: ModeKey, trees: dict[StepMode, nn.Module]
    ) -> Any:
        communicator = self.communicators.of_width(key.width, key.stages)
        activate(communicator)
        before = used_bytes(self.device)
        with set_current_vllm_config(config):
            modes = frozenset() if self.borrowing is None else self.borrowing.modes
            runner = make_runner(config, self.device, trees, modes, communicator.links)
        self.other_bytes[f"runner_{key}"] = max(0, used_bytes(self.device) - before)
        return runner

    def _activations(self, config: VllmConfig, runners: dict[ModeKey, Any]) -> int:
        """Return the device memory that the largest step takes besides KV and graphs."""
        first = self.keys[0]
        activate(self.communicators.of_width(first.width))
        with set_current_vllm_config(config):
            activations = activation_bytes(self.device, runners[first].profile_run)
        activations += max(each.sent_bytes for each in runners.values())
        self.other_bytes["activations"] = activations
        return activations

    def _allocate_kv(
        self, configs: dict[ModeKey, VllmConfig], runners: dict[ModeKey, Any], progress: Progress
    ) -> KVBuffer:
        config = configs[self.keys[0]]
        with set_current_vllm_config(config):
            specs = whole_specs(runners[self.keys[0]].get_kv_cache_spec(), config)
        reserved = self._activations(config, runners)
        known, graphs = lasting_bytes(self.spec.lasting, self.spec.rank), 0
        if not all_ranks(bool(known)):
            graphs = graph_bytes(self.communicators, configs, runners, progress)
            log.info("memory_reserved", rank=self.spec.rank, activations=reserved, graphs=graphs)
        before = self.other_bytes["context"]
        budget = known or kv_budget_bytes(config, self.device, before, reserved + graphs)
        geometry = geometry_of(specs)
        pages = config.cache_config.num_gpu_blocks_override or geometry.num_pages(budget)
        widest = self.spec.widest  # It serves tasks that are too long for one rank.
        longest = config.model_config.max_model_len
        if pages < (need := geometry.pages_for_tokens(longest, widest) + 1):
            raise ViewError(
                f"{pages} pages of KV memory, but a group {widest} wide needs {need} for a task of "
                f"{longest} tokens: raise --kv-cache-memory-bytes or lower --max-model-len."
            )
        memory = self.spec.memory
        self._lasting = lasting_kv(self.spec, geometry, self.device)
        if memory is None:
            own = self._lasting.take if self._lasting is not None else None
            return KVBuffer(specs, pages, self.device, own)
        splits = {key.split for key in self.keys}
        of_cell = memory, self.spec.rank, self.spec.world, pages, geometry, splits
        self._directories = open_directories(*of_cell, is_trusted=not self.spec.crashed)
        take = partial(take_kv, memory, self.spec.rank, geometry, self._directories)
        return KVBuffer(specs, pages, self.device, take)

    def _connect_peers(self) -> tuple[dict[Rank, RankMailbox], Mover]:
        """Connect to the mailboxes and KV memory of all ranks that it can exchange tasks with."""
        spec = self.spec
        if spec.memory is not None:
            mailboxes, mover = shared_peers(spec.memory, spec.rank, spec.world, self.kv)
        else:
            map_all = self._lasting.map_all if self._lasting is not None else map_peers
            of_cohort = spec.rank, spec.first, spec.world, self.kv
            mailboxes, mover = open_peers(*of_cohort, peer_access=spec.peer_access, map_all=map_all)
        for width in spec.widths:
            if width <= self.kv.geometry.num_kv_heads:  # Replicated heads do not migrate.
                mover.warm(width)
        return mailboxes, mover

    @property
    def is_synchronous(self) -> bool:
        """Whether a step is over once it was launched."""
        return self.device.type == "cpu"

    @property
    def holds_steps(self) -> bool:
        """Whether groups are left for a migration with a deferred step, not a detached one."""
        return self.is_synchronous

    def done(self) -> Callable[[], bool]:
        """Return a query for whether the device has done all that was launched until now."""
        return launched(self.device, self._selected)

    def mark(self) -> Callable[[], None]:
        """Return a call after which the caller's later work waits for what this thread launched."""
        if self.device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def meet(self, width: int) -> None:
        """Order later launches after all that the members of this width have launched so far."""
        self.of_width(width).communicator.group.all_reduce(self._token)

    def copy_aside(self) -> None:
        """Let the calling thread's copies run beside in-flight steps."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # High priority puts copies before the kernels of such steps: all later work waits for
            # them.
            torch.cuda.set_stream(torch.cuda.Stream(self.device, priority=-1))

    def _prepare(
        self,
        key: ModeKey,
        config: VllmConfig,
        runner: Any,
        structured: StructuredOutputManager,
    ) -> PreparedMode:
        communicator = self.communicators.of_width(key.width, key.stages)
        activate(communicator)
        logical = self.kv.logical_config(key.split)
        config.cache_config.num_gpu_blocks = logical.num_blocks
        page = self.kv.geometry.slots(key.split)
        slots, place = page.count, communicator.rank_in_group
        with set_current_vllm_config(config):
            if runner is not None:
                runner.adopt_kv(self.kv.config(key.split, place), self.kv, key.width)
            scheduler = None
            if place == 0:
                asynchronous = config.scheduler_config.async_scheduling
                kind = AsyncModeScheduler if asynchronous else ModeScheduler
                scheduler = kind(config, logical, structured, slots)
        table = SlotTable(self.kv.num_pages, slots, page) if key.width > 1 else None
        times = StepTimes(key.width, {})
        mode = PreparedMode(
            key, communicator, runner, table, scheduler, config, times, self.borrowing, self.host
        )
        if self.lost is not None:
            mode.lost = self.lost
            mode.directory = self.lost.directory_of(lease_key(communicator.ranks, key.stages))
        if scheduler is not None:
            connect_sources(scheduler, mode)
        return mode

    def _open_sources(self, *, hashes: bool) -> tuple[HostTier | None, LostKV | None]:
        """Open what tasks load blocks from: host pages, and the memory of lost groups."""
        spec, lost = self.spec, None
        if hashes and spec.memory is not None:
            geometry, directories = self.kv.geometry, self._directories
            own = self.kv.raw.view(-1).numpy().view("u1").reshape(geometry.num_layers, -1)
            lost = open_lost_kv(spec.memory, spec.rank, spec.world, directories, geometry, own)
        elif hashes and self._lasting is not None:
            lost = self._lasting.open_lost()
        host = open_host_pages(spec, self.kv, hashes=hashes)
        if host is not None:
            host.validity = self.communicators.validity
            if host.lanes is not None:
                self.mover = AfterStores(self.mover, host.lanes.order_stores)
        return host, lost

    def distrust(self) -> None:
        """Let nobody use this rank's KV or weights after an error that it does not know."""
        if self.lost is not None:
            self.lost.distrust()
            log.warning("kv_distrusted", rank=self.spec.rank, advice="its tasks are computed again")
        forget_weights(self.spec.lasting, self.spec.rank)

    def order_copies(self) -> None:
        """Let what is launched from now on wait for loads that go beside steps."""
        if self.host is not None:
            self.host.order_loads()

    def give_host_pages(self) -> None:
        """Give host pages to ranks whose blocks are younger; see `HostDirectory.give`."""
        if self.host is not None:
            self.host.give_pages()

    def stop_copies(self) -> None:
        """End the copies of host pages that go beside steps: the rank leaves its group."""
        if self.host is not None:
            self.host.stop()
            for mode in self.modes.values():
                if mode.scheduler is not None and mode.scheduler.blocks is not None:
                    mode.scheduler.blocks.stop()

    def know(self, present: Mapping[Rank, int]) -> None:
        """Take note of the processes of the cell: the incarnation of each rank."""
        if self.lost is not None:
            self.lost.know(present)

    def _block_hasher(self) -> "Callable[..., list[bytes]] | None":
        cache = self.base.cache_config
        if not cache.enable_prefix_caching:
            return None
        hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        return get_request_block_hasher(cache.block_size, hash_fn)

    def _warm(self, progress: Progress) -> None:
        """Capture graphs, run and time each mode once, all ranks in one order.

        A rank that takes a lost one's place has what that one measured. If it joins serving ones it
        needs the probes, too, and takes part from then on.
        """
        spec, known = self.spec, known_measurements(self.spec)
        if not all_ranks(known is not None and known.has({str(key) for key in self.modes})):
            known = None
        floor_us = {} if known is not None else self._measure_floors()
        for done, (key, mode) in enumerate(self.modes.items()):
            progress("warm", done, len(self.modes))
            self.select(key.width, stages=key.stages)
            mode.communicator.group.barrier()
            with set_current_vllm_config(mode.config):
                bound = known and known.launch_bound.get(str(key))
                self.other_bytes[f"graphs_{key}"] = mode.runner.prepare_graphs(bound)
                mode.runner.warm()
                mode.communicator.group.barrier()
                settle_parts(mode.runner, self.device)
                if known is None:
                    place = mode.runner, key.width, self.device
                    stages = mode.communicator.group if key.stages > 1 else None
                    mode.calibrate(measure_steps(*place, floor_us, stages))
                else:
                    mode.calibrate(known.times[str(key)])
            if not spec.joins or key.width == 1:
                self._probe(mode)
        if known is not None:
            self.probed = known.probes_with(self.probed, {key.width for key in self.modes})
        elif (memory := memory_of_measurements(spec)) is not None:
            whole = 0 if self.borrowing is None else self.borrowing.whole_layers
            StartupMeasurements.of(self.modes, self.probed, whole).store(memory, spec.rank)
            self.communicators.of_width(max(spec.widths)).group.barrier()
        self.communicators.join()
        if self.host is not None:
            self.host.begin()
        progress("warm", len(self.modes), len(self.modes))

    def _measure_floors(self) -> dict[StepMode, int]:
        """Return the floors of the modes that borrow, in microseconds; a collective of all."""
        borrowing = self.borrowing
        if borrowing is None:
            return {}
        # All ranks borrow at once, as in service.
        together = self.select(self.spec.widest).communicator.group.barrier
        floors = borrowing.floors_s(together)
        floor_us = {mode: round(seconds * 1e6) for mode, seconds in floors.items()}
        log.info(
            "loans_measured",
            floor_us={str(mode): us for mode, us in floor_us.items()},
            step_bytes={
                str(mode): sum(ring.step_bytes for ring in rings)
                for mode, rings in borrowing.rings.items()
            },
        )
        return floor_us

    def _probe(self, mode: PreparedMode) -> None:
        """Compute the probe in all modes of the selected width, together with its group."""
        for each in mode.runner.modes:
            started_ns = time.perf_counter_ns()
            values = self.probe.run(mode.execute, each)
            took_us = (time.perf_counter_ns() - started_ns) // 1000
            self.probed[mode.key.width, each] = values, took_us

    # ------------------------------------------------------------------ serving

    def of_width(self, width: int, stages: int = 1) -> PreparedMode:
        """Return the prepared mode for groups of this width and number of pipeline stages."""
        narrow = Mode.DP if width == 1 else Mode.TP
        return self.modes[ModeKey(Mode.PP if stages > 1 else narrow, width, stages)]

    def select(self, width: int, formation: int = 0, stages: int = 1) -> PreparedMode:
        """Make vLLM's layers in this process compute in such groups, for a formation."""
        mode = self.of_width(width, stages)
        self.communicators.enter(formation)
        activate(mode.communicator)
        self._selected = mode.communicator
        return mode

    def facts(self) -> EngineFacts:
        """Return what the rank reports of this engine."""
        scheduling = self.base.scheduler_config
        return EngineFacts(
            device=str(self.device),
            max_tasks=scheduling.max_num_seqs,
            max_model_len_tokens=self.base.model_config.max_model_len,
            tokens_per_step_max=scheduling.max_num_batched_tokens,
            memory=self.memory(),
            step_times=tuple(map(width_times, self.step_times())),
            whole_layers=None if self.borrowing is None else self.borrowing.whole_layers,
            inherits=self.lost is not None and self.lost.inherits,
        )

    def memory(self) -> tuple[tuple[str, int], ...]:
        """Return (what, bytes) of weights, ring, whole layers, views, communicators and KV."""
        communicators = tuple(
            (f"communicator_{name}", each.memory_bytes) for name, each in self.communicators.named()
        )
        views = tuple((f"views_{name}", size) for name, size in self.view_bytes.items())
        return (
            ("weights", self.replica_bytes),
            *(self.borrowing.memory.items() if self.borrowing is not None else ()),
            *views,
            *communicators,
            *((name, size) for name, size in self.other_bytes.items() if size),
            ("kv", self.kv.raw.numel()),
        )

    def communicator_ms(self) -> dict[str, float]:
        """Return the time to create and warm each communicator, in milliseconds."""
        return {
            f"communicator_{name}_ms": round(each.created_ms, 1)
            for name, each in self.communicators.named()
        }

    def step_times(self) -> tuple[StepTimes, ...]:
        """Return the start-up measurements, by width."""
        of_width: dict[int, StepTimes] = {}
        for mode in self.modes.values():
            if mode.times.curves:
                known = of_width.get(mode.width)
                of_width[mode.width] = mode.times if known is None else known.plus(mode.times)
        return tuple(of_width.values())

    def gauges(self) -> tuple[tuple[str, int], ...]:
        """Return the gauges in which a leak would show, and what vLLM's schedulers counted."""
        return (
            *process_gauges(),
            ("loaded_bytes", self.loaded_bytes),
            ("process_groups", self.communicators.process_groups()),
            ("process_groups_at_start", self.communicators.created),
            *(self.host.totals() if self.host is not None else ()),
            *(self.lost.totals() if self.lost is not None else ()),
            *engine_totals((mode.scheduler for mode in self.modes.values()), self.borrowing),
        )
