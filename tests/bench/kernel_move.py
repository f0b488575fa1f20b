"""How fast the KV of running tasks changes hands: dpN -> tpN at the KV shape of Llama 3 70B.

`python -m tests.bench.kernel_move --ranks 4` starts one process per GPU with 24 GiB of KV each.
100,000 tokens lie equally on the ranks, in scattered pages; every rank takes its heads of them from
all others at the same time. Prints one JSON object: milliseconds of the slowest rank and GB/s per
rank, by way of moving, alone and beside matrix products as a decode step has them, and what those
take then. All bytes are checked. Needs torch and Triton, no vLLM.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.transfer.host_mover import connect
from kvadaptor.transfer.movers import ExchangeMover, PeerMover
from kvadaptor.transfer.peers import allocate, map_peers
from kvadaptor.transfer.rounds import Mover, Round
from kvadaptor.transfer.unit_copy import KernelCopier
from tests.harness.vllm.mover_ranks import World, run_ranks

LAYERS = 80
WARM_MOVES = 2
SHAPES = (
    *((1024, 1 << 30, 8), (1024, 132, 8), (2048, 32, 16), (2048, 64, 16)),
    *((4096, 8, 32), (4096, 16, 32), (4096, 32, 32), (4096, 64, 32)),
)
"""To compare: 16-byte words of a tile, programs, warps."""
STEP_TOKENS = 112
STEP_SIZES = ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192))
"""Of the matrix products of one layer of Llama 3 70B."""


def plan(geometry: PageGeometry, world: int, pages: int, tokens: int) -> Round:
    """All ranks' copies: rank r takes unit r of every page that another holds, into free pages."""
    held_pages = geometry.pages_for_tokens(tokens // world, 1)
    held, free = [], []
    for rank in range(world):
        order = np.random.default_rng(rank).permutation(np.arange(1, pages))
        held.append(np.sort(order[:held_pages]))
        free.append((order[held_pages:, None] * world + np.arange(world)).reshape(-1))
    found = {}
    for rank in range(world):
        others = [source for source in range(world) if source != rank]
        assert free[rank].size >= held_pages * len(others), "the buffer is too small for both."
        found[rank] = {
            source: (
                held[source] * world + rank,
                free[rank][index * held_pages : (index + 1) * held_pages],
            )
            for index, source in enumerate(others)
        }
    return found


class Memory:
    """A rank's KV with content that says where each 8-byte word comes from."""

    def __init__(self, raw: torch.Tensor, units: int) -> None:
        layers = raw.view(torch.int64).view(LAYERS, -1)
        self.layers = layers
        self.words = layers.shape[1] // units
        self.units = layers.view(LAYERS, units, self.words)

    def fill(self, rank: int) -> None:
        """Word w of layer l of rank r holds (r·layers + l)·2⁴⁰ + w."""
        numbers = torch.arange(self.layers.shape[1], device=self.layers.device)
        for layer in range(LAYERS):
            torch.add(numbers, (rank * LAYERS + layer) << 40, out=self.layers[layer])

    def is_right(self, copies: Any) -> bool:
        """Whether all targets hold their sources; then clears them for the next way."""
        device = self.layers.device
        word = torch.arange(self.words, device=device)
        right = True
        for source, (source_units, target_units) in copies.items():
            first = torch.from_numpy(source_units).to(device) * self.words
            targets = torch.from_numpy(target_units).to(device)
            for layer in range(LAYERS):
                wanted = first[:, None] + (word + ((source * LAYERS + layer) << 40))
                right &= bool(torch.equal(self.units[layer][targets], wanted))
                self.units[layer][targets] = 0
        return right


def movers(world: World, raw: Any, geometry: PageGeometry) -> Iterator[tuple[str, Mover]]:
    """The ways to compare, made one after the other; collective."""
    mapped = map_peers(raw, world.cpu_group)
    if mapped.refusal is not None:
        print("no PeerMover:", mapped.refusal, flush=True)
    elif world.device.type == "cpu":
        yield "peer", PeerMover(world.rank, mapped.memory, geometry)
    else:
        from kvadaptor.transfer.copy_kernel import Shape

        for tile_words, programs, warps in SHAPES:
            shape = Shape(tile_words, programs, warps)
            copier = KernelCopier(LAYERS, world.device, shape=shape)
            mover = PeerMover(world.rank, mapped.memory, geometry, copier=copier)
            how_many = programs if programs < 1 << 20 else "as many as tiles"
            yield f"peer, tiles of {tile_words // 64} KiB, programs: {how_many}", mover
    through_host, refusal = connect(raw, geometry, world.cpu_group)
    if through_host is None:
        print("no HostMover:", refusal, flush=True)
    else:
        yield "host", through_host
    yield "exchange", ExchangeMover(raw, geometry, world.device_group)


class DecodeStep:
    """A graph of the matrix products of a decode step in fp8, which read weights from memory."""

    def __init__(self, device: Any) -> None:
        kind = torch.float8_e4m3fn
        one = torch.ones((), device=device)
        inputs = [torch.ones(STEP_TOKENS, size, device=device).to(kind) for size, _ in STEP_SIZES]
        weights = [torch.ones(b, a, device=device).to(kind).t() for a, b in STEP_SIZES]

        def layer() -> None:
            for given, weight in zip(inputs, weights, strict=True):
                torch._scaled_mm(given, weight, one, one, out_dtype=torch.bfloat16)

        layer()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(LAYERS):
                layer()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def launch(self) -> None:
        """On the current stream."""
        self._events[0].record()
        self._graph.replay()
        self._events[1].record()

    def took_ms(self) -> float:
        """Wait for the last one."""
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]))


def beside(
    world: World, step: DecodeStep, mover: Mover, copies: Round, repeats: int
) -> dict[str, Any]:
    """Milliseconds of a step and of the move, alone and beside each other, of this rank."""
    aside = torch.cuda.Stream(priority=-1)
    alone, steps, moves = [], [], []
    for _ in range(WARM_MOVES + repeats):
        world.barrier()
        step.launch()
        alone.append(step.took_ms())
        world.barrier()
        step.launch()
        with torch.cuda.stream(aside):
            moves.append(mover.move(copies, Split(1, world.size)).seconds * 1e3)
        steps.append(step.took_ms())
    names = ("step_alone_ms", "step_beside_ms", "move_beside_ms")
    values = (alone, steps, moves)
    return {
        name: round(statistics.median(each[WARM_MOVES:]), 2)
        for name, each in zip(names, values, strict=True)
    }


def measure(world: World, tokens: int, gib: float, repeats: int, heads: int) -> dict[str, Any]:
    """One rank's part; rank 0's answer is of all ranks."""
    geometry = PageGeometry(LAYERS, heads, 128, 128, 2, 16)
    pages = geometry.num_pages(int(gib * 2**30))
    raw = allocate(pages * geometry.page_bytes, world.device)
    memory = Memory(raw, pages * world.size)
    memory.fill(world.rank)
    copies = plan(geometry, world.size, pages, tokens)
    memory.is_right(copies[world.rank])  # clears the targets
    step = DecodeStep(world.device) if world.device.type == "cuda" else None
    found = {}
    for name, mover in movers(world, raw, geometry):
        mover.warm(world.size)
        seconds, stats = [], None
        for _ in range(WARM_MOVES + repeats):
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            world.barrier()
            stats = mover.move(copies, Split(1, world.size))
            times: list[Any] = [None] * world.size
            dist.all_gather_object(times, stats.seconds, group=world.cpu_group)
            seconds.append(max(times))
        world.barrier()
        seconds = seconds[WARM_MOVES:]
        verdicts: list[Any] = [None] * world.size
        right = memory.is_right(copies[world.rank])
        dist.all_gather_object(verdicts, right, group=world.cpu_group)
        assert stats is not None
        found[name] = {
            "ms_median": round(statistics.median(seconds) * 1e3, 2),
            "ms_min": round(min(seconds) * 1e3, 2),
            "ms_max": round(max(seconds) * 1e3, 2),
            "gib_per_rank": round(stats.link_bytes / 2**30, 3),
            "gb_per_s_per_rank": round(stats.link_bytes / statistics.median(seconds) / 1e9, 1),
            "bytes_right": all(verdicts),
        }
        if step is not None:
            found[name] |= beside(world, step, mover, copies, repeats)
            memory.is_right(copies[world.rank])  # clears the targets
    return found


def main() -> None:
    """Run all ranks and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--gib", type=float, default=24.0, help="KV memory of each rank")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--heads", type=int, default=8, help="KV heads of the model")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args()
    answers = run_ranks(
        *(given.ranks, measure, given.tokens, given.gib, given.repeats, given.heads),
        device=given.device,
        limit_s=120,
    )
    print(json.dumps({"options": vars(given), "results": answers[0]}, indent=1))


if __name__ == "__main__":
    main()
