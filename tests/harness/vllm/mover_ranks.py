"""Small processes that share KV memory and move units, and a model of what must come out.

Imports no vLLM, so that the same runs on any machine with torch.
"""

import multiprocessing
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.transfer import host_mover
from kvadaptor.transfer.host_mover import connect
from kvadaptor.transfer.movers import ExchangeMover, PeerMover, make_mover
from kvadaptor.transfer.peers import allocate, map_peers
from kvadaptor.transfer.rounds import MoveError, Mover, Round

GEOMETRY = PageGeometry(
    num_layers=4, num_kv_heads=4, head_dim_k=8, head_dim_v=8, dtype_bytes=2, tokens_per_slot=4
)
UNITS = 4
FINEST = [Split(*each) for each in ((1, UNITS), (1, 2), (1, 1), (2, 2), (4, 1), (2, 4))]
"""Units that are heads alone, and such that are a range of layers of them, or of all."""

LIMIT_S = 90


@dataclass(frozen=True)
class World:
    """What a rank's function is given."""

    rank: int
    size: int
    device: torch.device
    cpu_group: Any
    device_group: Any

    def barrier(self) -> None:
        """Meet all ranks."""
        dist.barrier(group=self.cpu_group)


def _child(
    rank: int, size: int, device: str, store: str, results: Any, run: Any, arguments: Any
) -> None:
    try:
        results.put((rank, _joined(rank, size, device, store, run, arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def _joined(rank: int, size: int, device: str, store: str, run: Any, arguments: Any) -> Any:
    torch.set_num_threads(1)
    place = torch.device(device)
    backend = "gloo"
    if place.type == "cuda":
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    cpu_group = dist.new_group(backend="gloo")
    device_group = dist.group.WORLD if place.type == "cuda" else dist.new_group(backend="gloo")
    try:
        return run(World(rank, size, place, cpu_group, device_group), *arguments)
    finally:
        dist.destroy_process_group()


def run_ranks(
    size: int,
    run: Callable[..., Any],
    *arguments: Any,
    device: str = "cpu",
    limit_s: int = LIMIT_S,
    method: Literal["fork", "forkserver"] = "forkserver",
) -> list[Any]:
    """Call `run(world, *arguments)` in `size` new processes; return what each returned.

    One process imports torch, the ranks are forked from it: it has neither threads nor a device.
    A caller that is such a process itself says `fork`.
    """
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        store = str(Path(folder, "store"))
        ranks = [
            context.Process(
                target=_child, args=(rank, size, device, store, results, run, arguments)
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        try:
            answers = {}
            for _ in ranks:
                rank, value, error = results.get(timeout=limit_s)
                assert error is None, f"rank {rank}: {error}"
                answers[rank] = value
        finally:
            for process in ranks:
                process.join(0 if len(answers) < size else 10)
                process.kill()
                process.join()
    return [answers[rank] for rank in range(size)]


# ------------------------------------------------------------------------------ model


def content(rank: int, pages: int) -> Any:
    """A rank's memory at the start, (bytes,) int8."""
    size = pages * GEOMETRY.page_bytes
    return np.random.default_rng(rank).integers(-128, 128, size, dtype=np.int8)


def by_unit(memory: Any, finest: Split) -> Any:
    """The memory as (pages, ranges of layers, ranges of heads, layers, unit bytes); a view."""
    layers = GEOMETRY.num_layers // finest.pp
    unit_bytes = GEOMETRY.layer_page_bytes // finest.tp
    return memory.reshape(finest.pp, layers, -1, finest.tp, unit_bytes).transpose(2, 0, 3, 1, 4)


def random_round(pages: list[int], seed: int, share: float = 0.4, units: int = UNITS) -> Round:
    """Any units of any ranks to any others, of which none is read."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(count * units) for count in pages]
    readable = [order[: int(order.size * (1 - share))] for order in orders]
    found = {}
    for rank, order in enumerate(orders):
        targets = order[readable[rank].size :]
        sources = rng.integers(0, len(pages), targets.size)
        found[rank] = {
            int(source): (
                rng.choice(readable[source], int((sources == source).sum())),
                targets[sources == source],
            )
            for source in np.unique(sources)
        }
    return found


def expected(copies: Round, pages: list[int], rank: int, finest: Split = FINEST[0]) -> Any:
    """What a rank's memory holds after the round."""
    memory = content(rank, pages[rank])
    own = by_unit(memory, finest)
    for source, pair in copies.get(rank, {}).items():
        other = by_unit(content(source, pages[source]), finest)
        for source_unit, target_unit in zip(*(each.tolist() for each in pair), strict=True):
            own[_place(target_unit, finest)] = other[_place(source_unit, finest)]
    return memory


def _place(unit: int, finest: Split) -> tuple[int, int, int]:
    """Page, range of layers and range of heads of a unit."""
    page, inside = divmod(unit, finest.width)
    return (page, *divmod(inside, finest.tp))


# ------------------------------------------------------------------------------ what ranks do


def _fill(raw: torch.Tensor, memory: Any) -> None:
    raw.copy_(torch.from_numpy(memory))
    if raw.device.type == "cuda":
        torch.cuda.synchronize()


def move_both_ways(world: World, pages: list[int], rounds: int) -> dict[str, Any]:
    """Random rounds with both movers; what came out right, and what the kernel counted."""
    own = pages[world.rank]
    raw = allocate(own * GEOMETRY.page_bytes, world.device)
    mapped = map_peers(raw, world.cpu_group)
    assert mapped.refusal is None, mapped.refusal
    # Two units of each peer at a time, so that a round takes many steps.
    part = 2 * GEOMETRY.page_bytes * max(1, world.size - 1)
    exchange = ExchangeMover(
        raw, GEOMETRY, world.device_group, staging_bytes=4 * (part + 4096) // 4096 * 4096
    )
    through_host, reason = connect(
        raw, GEOMETRY, world.cpu_group, staging_bytes=8192 * max(1, world.size - 1)
    )
    assert through_host is not None, reason
    right: dict[str, list[bool]] = {"peer": [], "exchange": [], "host": []}
    stats = []
    movers: dict[str, Mover] = {
        "peer": PeerMover(world.rank, mapped.memory, GEOMETRY),
        "exchange": exchange,
        "host": through_host,
    }
    for name, mover in movers.items():
        for units in (1, 2, UNITS):
            mover.warm(units)
        for seed in range(rounds):
            finest = FINEST[seed % len(FINEST)]
            copies = random_round(pages, seed, units=finest.width)
            _fill(raw, content(world.rank, own))
            world.barrier()
            stats.append(mover.move(copies, finest))
            world.barrier()
            wanted = expected(copies, pages, world.rank, finest)
            right[name].append(bool(np.array_equal(raw.cpu().numpy(), wanted)))
    sizes = [(each.link_bytes, each.local_bytes) for each in stats]
    return {"right": right, "sizes": sizes}


def _gauges() -> tuple[int, int]:
    """Open files and mapped regions of this process."""
    regions = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), len(regions)


def move_often(world: World, moves: int) -> dict[str, Any]:
    """Open files and mappings before and after many moves."""
    raw = allocate(16 * GEOMETRY.page_bytes, world.device)
    mapped = map_peers(raw, world.cpu_group)
    mover = PeerMover(world.rank, mapped.memory, GEOMETRY)
    mover.warm(UNITS)
    copies = random_round([16] * world.size, 1)
    mover.move(copies, FINEST[0])
    world.barrier()
    before = _gauges()
    for _ in range(moves):
        mover.move(copies, FINEST[0])
    after = _gauges()
    regions = Path("/proc/self/maps").read_text().splitlines()
    return {
        "before": before,
        "after": after,
        # Python's own semaphores have lost their names already.
        "named": [line for line in regions if "/dev/shm" in line and "/sem.mp-" not in line],
        "shared": sum("memfd:aileron-kv" in line for line in regions),
    }


def lose_the_last(world: World, pages: int, is_begun: bool) -> tuple[str, bool]:
    """Move through the host while the last rank ends, before its part or in the middle of it.

    Returns what the mover says, and whether all that does not come from the last rank is right.
    """
    last, finest = world.size - 1, FINEST[0]
    raw = allocate(pages * GEOMETRY.page_bytes, world.device)
    mover, reason = connect(raw, GEOMETRY, world.cpu_group, staging_bytes=8192 * last)
    assert mover is not None, reason
    mover.warm(UNITS)
    _fill(raw, content(world.rank, pages))
    copies = random_round([pages] * world.size, 7)
    world.barrier()
    if world.rank == last:
        if is_begun:
            host_mover.POLL_S = 0.02
            threading.Thread(target=mover.move, args=(copies, finest), daemon=True).start()
            time.sleep(0.1)
        return "", True
    try:
        mover.move(copies, finest)
    except MoveError as error:
        said = str(error)
    else:
        said = "nothing"
    wanted = expected(copies, [pages] * world.size, world.rank)
    found = raw.cpu().numpy()
    for _, target in zip(*(each.tolist() for each in copies[world.rank][last]), strict=True):
        place = _place(target, finest)
        by_unit(wanted, finest)[place] = by_unit(found, finest)[place]
    return said, bool(np.array_equal(found, wanted))


def choose(world: World, peer_access: bool) -> tuple[str, str | None]:
    """The kind of mover that this rank gets, and why it is not the fastest."""
    raw = allocate(16 * GEOMETRY.page_bytes, world.device)
    groups = {"cpu_group": world.cpu_group, "device_group": world.device_group}
    mover, reason = make_mover(raw, GEOMETRY, **groups, peer_access=peer_access)
    return type(mover).__name__, reason


def map_with_one_private(world: World, private: int) -> str | None:
    """The verdict of this rank when one rank's memory cannot be exported."""
    raw = allocate(4096, world.device)
    if world.rank == private:
        raw = torch.zeros(4096, dtype=torch.int8)
    return map_peers(raw, world.cpu_group).refusal


def map_with_one_blind(world: World, blind: int) -> tuple[str | None, int]:
    """The verdict when one rank cannot open what the others offer."""
    from kvadaptor.transfer import peers

    if world.rank == blind:
        peers._open_file = _refuse
    mapped = map_peers(allocate(4096, world.device), world.cpu_group)
    return mapped.refusal, len(mapped.memory)


def _refuse(handle: Any) -> Any:
    raise PermissionError(13, "Permission denied")
