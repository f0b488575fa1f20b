"""Pauses of clients at `reshard` switches with early copies and without, on two CPU ranks.

`python -m tests.bench.precopy [ROUNDS]`: two cells, one round of switches each, in turns.
"""

import asyncio
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.shared import PATIENCE

ROUNDS = 6
SWITCHES = ("tp2", "dp2", "tp2", "dp2")
LOADS = {"4 streams of 60 tokens": (4, 60), "12 streams of 600 tokens": (12, 600)}


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


async def round_of(cell: BareCell, tag: str, streams: int, tokens: int) -> Round:
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
            client.submit(name, prompt, max_tokens=400)
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
    pauses = [max(g for at, g in gaps if at < end and at + g > a) for a, end in spans]
    early = [
        (a, a + seen[epoch]["precopy_ms"] / 1e3)
        for (a, _), epoch in zip(spans, records, strict=True)
    ]
    beside = [gap for at, gap in gaps if any(a < at and at + gap < end for a, end in early)]
    return Round(
        statistics.median(calm) * 1e3,
        statistics.median(pauses) * 1e3,
        statistics.median(seen[epoch]["stall_ms"] or 0 for epoch in records),
        statistics.median(seen[epoch]["precopy_bytes"] for epoch in records),
        statistics.median(seen[epoch]["reshard_bytes"] for epoch in records),
        statistics.median(beside) * 1e3 if beside else 0.0,
    )


async def main(rounds: int) -> None:
    with ExitStack() as stack:
        cells = {
            precopy: stack.enter_context(
                bare_cell(
                    Path(tempfile.mkdtemp()),
                    ranks=2,
                    engine_args=["--dtype", "float32", "--max-model-len", "1024"],
                    pause_limit_ms=60_000,
                    precopy=precopy,
                    **PATIENCE,
                )
            )
            for precopy in ("off", "on")
        }
        for load, (streams, tokens) in LOADS.items():
            found: dict[str, list[Round]] = {precopy: [] for precopy in cells}
            for number in range(rounds):
                for precopy, cell in cells.items():
                    tag = f"{tokens}-{number}-{precopy}"
                    found[precopy].append(await round_of(cell, tag, streams, tokens))
            for precopy, several in found.items():
                print(f"{load}, precopy {precopy}: {line_of(several)}", flush=True)


def line_of(rounds: list[Round]) -> str:
    """Medians over the rounds, and the range of the pauses in steps."""
    in_steps = sorted(each.pause / each.step for each in rounds)
    middle = {
        name: statistics.median(getattr(each, name) for each in rounds)
        for name in ("step", "beside", "pause", "stall", "early_bytes", "late_bytes")
    }
    return (
        f"step {middle['step']:.1f} ms, {middle['beside']:.1f} beside copies, "
        f"longest pause {middle['pause']:.1f} ms = {statistics.median(in_steps):.2f} steps "
        f"({in_steps[0]:.2f} to {in_steps[-1]:.2f}), ranks stall {middle['stall']:.1f} ms, "
        f"{middle['early_bytes'] / 1e6:.2f} MB early, {middle['late_bytes'] / 1e6:.2f} MB late"
    )


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS))
