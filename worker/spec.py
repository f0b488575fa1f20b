"""What a rank must know to start, from the configuration and from its cohort."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from comm_pool import loans
from comm_pool.cpu.cell_memory import CellMemory
from comm_pool.cuda.lasting_memory import LastingMemory
from comm_pool.layout import Rank
from comm_pool.mixed import Mixed, Staged
from coordinator.protocol.config import CellConfig, Config
from coordinator.protocol.cores import usable_cores
from coordinator.protocol.floor import floor_goal_s
from worker.cohort import Cohort
from worker.memories import Memories

HOST_ALIGNMENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank must know to start.

    The `world` ranks from `first` on may form groups of `widths`: all ranks of the cell, or those
    that restart together. `widest` is the widest group of the cell.
    """

    rank: Rank
    first: Rank
    world: int
    widths: tuple[int, ...]
    widest: int
    init_method: str
    threads: int
    mixed: tuple[Mixed, ...] = ()
    pipelines: tuple[Staged, ...] = ()
    """The pipeline groups to prepare."""
    cohort: int = 0
    """The number shared by ranks that can form wide groups."""
    together: Mapping[Rank, int] = field(default_factory=dict)
    """The incarnations of the ranks that start together."""
    memory: CellMemory | None = None
    """The memory that all ranks of the cell share; on CPU."""
    links: CellMemory | None = None
    """The memory between the stages of pipeline groups where `memory` has none; on CUDA."""
    lasting: LastingMemory | None = None
    """What outlives the ranks; on CUDA, if a lost rank's peers can use it."""
    host_memory: CellMemory | None = None
    """The memory of the host pages, named `host_kv_name()`; None if there are none."""
    host_kv_bytes: int = 0
    """Its size."""
    host_kv_is_optional: bool = False
    """Whether the rank serves without host pages if it cannot open them: nobody asked for them."""
    cell_ranks: int = 1
    """The ranks of the cell."""
    exchange_parts: tuple[int, ...] = (1,)
    """The numbers of parts in which large sp steps may exchange; start-up measures the best one."""
    parts: int = 1
    """The number of parts of the weights, of which the rank holds one; 1: it holds all."""
    borrow: Literal["none", "ffn", "all"] = "none"
    """The layers that are in parts, which the rank reads from others during a step.

    With `none` all linear layers are, and it reads nothing.
    """
    whole_layers: Literal["auto"] | int = 0
    """The number of layers whose feed-forward part the rank holds whole.

    `auto` is the fewest with which a step takes at most `floor_goal_s`.
    """
    floor_goal_s: float | None = None
    """The longest step, in seconds, that loans alone should take; None if no tier has a goal."""
    peer_access: bool = True
    """Whether devices may read each other's memory."""
    ranks_per_device: int = 1
    crashed: bool = False
    """Whether the process before this one ended by an error of its own: its memory may be wrong."""
    joins: bool = False
    """Whether the others already serve; the rank then replaces a lost process in their memory."""


def modes_widths(spec: RankSpec) -> tuple[int, ...]:
    """Return the widths of groups that ranks can serve in, ascending.

    Ranks that hold one part of the weights serve in the widest groups, and alone if they borrow
    what they lack. Groups between lack parts, as neighbouring members hold the same one
    (comm_pool/mixed.py).
    """
    if spec.parts == 1:
        return spec.widths
    return (spec.widest,) if spec.borrow == "none" else (1, spec.widest)


def communicator_widths(spec: RankSpec) -> tuple[int, ...]:
    """Return the widths of aligned groups that serve or exchange heads, ascending, with 1.

    Communicators of other widths would take memory and start-up time for nothing.
    """
    used = {*modes_widths(spec), *(mixed.sp for mixed in spec.mixed)}
    return tuple(sorted({1, *used.intersection(spec.widths)}))


def part_of(spec: RankSpec) -> int:
    """Return the part of the weights that the rank holds: neighbours hold the same one."""
    return loans.part_of(spec.rank % spec.widest, spec.widest, spec.parts)


def rank_spec(
    config: Config,
    rank: Rank,
    cohort: Cohort,
    memories: Memories,
    together: Mapping[Rank, int] | None = None,
) -> RankSpec:
    """Return the spec of one rank of a cohort; `together` gives the incarnations of the cohort."""
    threads = config.cell.threads_per_rank
    if threads == 0 and config.cell.device == "cuda":
        threads = 1  # As in vLLM's workers: small CPU operations are slower on more threads.
    if threads == 0 and config.cell.device == "cpu":
        # Leave one core to the gateway: OpenMP threads that wait for a core stall all others.
        threads = max(1, (usable_cores() - 1) // config.cell.ranks)
    members = everyone(config) if cohort.joins else cohort.ranks
    world, whole = len(members), config.cell.whole_layers
    return RankSpec(
        rank=rank,
        first=members[0],
        world=world,
        widths=tuple(width for width in config.cell.widths if width <= world),
        widest=max(config.cell.widths),
        mixed=tuple(each for each in config.mixed_groups() if each.width <= world),
        pipelines=tuple(each for each in config.pipeline_groups() if each.width <= world),
        init_method=f"tcp://127.0.0.1:{cohort.port}",
        threads=threads,
        cohort=cohort.number,
        together=together or {},
        memory=memories.cell,
        links=memories.links,
        lasting=memories.lasting,
        host_memory=memories.host,
        host_kv_bytes=host_kv_bytes(config.cell),
        cell_ranks=config.cell.ranks,
        exchange_parts=config.cell.exchange_parts,
        parts=config.cell.weight_parts,
        borrow=config.cell.borrow if config.borrows else "none",
        whole_layers=whole[rank] if isinstance(whole, tuple) else whole,
        floor_goal_s=floor_goal_s(config.slo),
        peer_access=config.cell.peer_access == "auto",
        ranks_per_device=config.cell.ranks_per_device,
        joins=cohort.joins,
    )


def host_kv_bytes(cell: CellConfig) -> int:
    """Return the bytes of the cell's host pages, 0 if it has none."""
    gib = cell.host_kv_gib if cell.host_kv_gib != "auto" else 0.0
    return int(gib * 2**30) // HOST_ALIGNMENT_BYTES * HOST_ALIGNMENT_BYTES


def everyone(config: Config) -> tuple[Rank, ...]:
    """Return all ranks of the cell."""
    return tuple(map(Rank, range(config.cell.ranks)))
