"""Pauses of clients at `reshard` switches with early copies and without, on two ranks.

`python -m tests.bench.precopy [ROUNDS] [--shape llama-3-8b]`: two cells, one round of switches
each, in turns; on CPU with the demo model, or on two GPUs that both cells share, where the one
whose turn it is not computes nothing.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.bench.gpu_numbers import longest_gap
from tests.bench.gpu_shapes import DEMO, SHAPES, write_shape
from tests.harness.cells import devices
from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.shared import PATIENCE

ROUNDS = 6
SWITCHES = ("tp2", "dp2", "tp2", "dp2")
PARTS = ("decide_ms", "precopy_ms", "park_ms", "reshard_ms", "swap_ms", "first_step_ms")
"""Of a switch, as its record has them."""
ANSWER_TOKENS = 400
CPU_LOADS = ((4, 60), (12, 600))
"""Streams, and tokens of each prompt."""
GPU_LOADS = ((128, 512), (64, 4_000))
CPU_CONTEXT = 1024
CPU_ENGINE = (
    *("--dtype", "float32", "--max-model-len", str(CPU_CONTEXT)),
    *("--max-num-seqs", "128"),  # All streams of the timeline decode in each step.
)
GPU_ENGINE = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "8192"),
    *("--max-num-seqs", "128"),
    *("--gpu-memory-utilization", "0.44"),
)
GPU_ANSWER_TOKENS = 2_000
KV_GIB = 24
"""Of each rank of each cell on a GPU."""


@dataclass(frozen=True)
class Round:
    """One round of switches, times in ms; medians over its switches."""

    step: float
    pause: float
    stall: float
    early_bytes: float
    late_bytes: float
    beside: float
    """The usual time between two tokens while KV is copied early; 0 if it took no time."""
    longest: tuple[float, ...]
    """The longest time between two tokens, of each stream at each switch."""
    parts: tuple[float, ...]
    """Medians of the parts of a switch."""


async def round_of(
    cell: BareCell, tag: str, streams: int, tokens: int, answer_tokens: int
) -> Round:
    for layout in SWITCHES[:2]:
        # What earlier rounds have cached would move, too.
        await asyncio.to_thread(cell.switch, layout, "recompute")
    client, loop = TaskClient(), asyncio.get_running_loop()
    spans: list[tuple[float, float]] = []
    records = []
    async with client.connected(cell):
        names = [f"{tag}-{number}" for number in range(streams)]
        for name in names:
            prompt = random.Random(name).choices(range(10, 4000), k=tokens)
            client.submit(name, prompt, max_tokens=answer_tokens, ignore_eos=True)
        found = [client.streams[name] for name in names]
        while not all(len(stream.tokens) > 10 for stream in found):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        for layout in SWITCHES:
            began = loop.time()
            record = (await asyncio.to_thread(cell.switch, layout, "reshard"))["switch"]
            spans.append((began, loop.time() + 0.05))
            await asyncio.sleep(0.3)
            records.append(record["epoch"])
        for name in names:
            client.cancel(name)
    seen = {r["epoch"]: r for r in cell.get("/admin/switches?last=60")["switches"]}
    gaps = [
        (before, after - before) for stream in found for before, after in pairwise(stream.times)
    ]
    calm = [gap for at, gap in gaps if not any(at < end and at + gap > a for a, end in spans)]
    at_switches = [[longest_gap(each.times, a, end) for each in found] for a, end in spans]
    longest = [[after - before for before, after in gaps] for gaps in at_switches]
    assert all(map(all, longest)), "a stream was over before the last switch"
    early = [
        (a, a + seen[epoch]["precopy_ms"] / 1e3)
        for (a, _), epoch in zip(spans, records, strict=True)
    ]
    beside = [gap for at, gap in gaps if any(a < at and at + gap < end for a, end in early)]
    return Round(
        statistics.median(calm) * 1e3,
        statistics.median(map(max, longest)) * 1e3,
        statistics.median(seen[epoch]["stall_ms"] or 0 for epoch in records),
        statistics.median(seen[epoch]["precopy_bytes"] for epoch in records),
        statistics.median(seen[epoch]["reshard_bytes"] for epoch in records),
        statistics.median(beside) * 1e3 if beside else 0.0,
        tuple(each * 1e3 for of_switch in longest for each in of_switch),
        tuple(statistics.median(seen[epoch][part] or 0 for epoch in records) for part in PARTS),
    )


def cell_of(precopy: str, shape: str, kv_gib: int = KV_GIB, *, worker: str = "worker") -> Any:
    """Return a cell that is not started yet, whose ranks this module runs."""
    kv = ("--kv-cache-memory-bytes", str(kv_gib << 30))
    folder = Path(tempfile.mkdtemp())
    on_gpus: dict[str, Any] = {} if shape == DEMO else {"model": write_shape(shape, folder)}
    return bare_cell(
        folder,
        ranks=2,
        engine_args=list(CPU_ENGINE if shape == DEMO else (*GPU_ENGINE, *kv)),
        device="cpu" if shape == DEMO else "cuda",
        pause_limit_ms=60_000,
        precopy=precopy,
        worker=worker,
        limits={} if shape == DEMO else devices.limits(2),
        **PATIENCE,
        **on_gpus,
    )


async def main(rounds: int, shape: str, kv_gib: int) -> None:
    loads, answer = (CPU_LOADS, ANSWER_TOKENS) if shape == DEMO else (GPU_LOADS, GPU_ANSWER_TOKENS)
    with ExitStack() as stack:
        cells = {}
        for precopy in ("off", "on"):
            cells[precopy] = stack.enter_context(cell_of(precopy, shape, kv_gib))
            print(f"precopy {precopy}: serves", flush=True)
        for streams, tokens in loads:
            found: dict[str, list[Round]] = {precopy: [] for precopy in cells}
            for number in range(-1, rounds):  # The first one warms up.
                for precopy, cell in cells.items():
                    tag = f"{tokens}-{number}-{precopy}"
                    each = await round_of(cell, tag, streams, tokens, answer)
                    print(f"{tag}: {line_of([each])}", flush=True)
                    found[precopy] += [each] * (number >= 0)
            for precopy, several in found.items():
                load = f"{streams} streams of {tokens} tokens"
                print(f"{load}, precopy {precopy}: {line_of(several)}", flush=True)


def line_of(rounds: list[Round]) -> str:
    """Medians over the rounds, and the range of the pauses in steps."""
    in_steps = sorted(each.pause / each.step for each in rounds)
    middle = {
        name: statistics.median(getattr(each, name) for each in rounds)
        for name in ("step", "beside", "pause", "stall", "early_bytes", "late_bytes")
    }
    parts = (statistics.median(each) for each in zip(*(r.parts for r in rounds), strict=True))
    named = ", ".join(f"{name} {ms:.1f}" for name, ms in zip(PARTS, parts, strict=True))
    longest = sorted(gap for each in rounds for gap in each.longest)
    p50, p99 = longest[len(longest) // 2], longest[int(0.99 * (len(longest) - 1))]
    return (
        f"step {middle['step']:.1f} ms, {middle['beside']:.1f} beside copies, "
        f"longest gap of a stream p50 {p50:.1f}, p99 {p99:.1f}, of all "
        f"{middle['pause']:.1f} ms = {statistics.median(in_steps):.2f} steps "
        f"({in_steps[0]:.2f} to {in_steps[-1]:.2f}), ranks stall {middle['stall']:.1f} ms, "
        f"{middle['early_bytes'] / 1e6:.2f} MB early, {middle['late_bytes'] / 1e6:.2f} MB late; "
        f"{named}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int, nargs="?", default=ROUNDS)
    parser.add_argument("--shape", choices=[*SHAPES, DEMO], default=DEMO)
    parser.add_argument("--kv-gib", type=int, default=KV_GIB, help="of each rank of each cell")
    args = parser.parse_args()
    asyncio.run(main(args.rounds, args.shape, args.kv_gib))
