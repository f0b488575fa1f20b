"""Where the pause of a switch goes: what both ranks do in the longest gap of any stream.

`python -m tests.bench.switch_timeline OUT [--shape llama-3-8b] [--streams 128] [--tokens 512]`: one
cell of two ranks with early copies, on CPU with the demo model, on two GPUs, or on one that they
share (what the host does takes as long; steps take longer). OUT is a folder for
what the ranks note (`tests.bench.profiled_worker`). Times are ms after the gap began.
"""

import argparse
import asyncio
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

from tests.bench.gpu_numbers import longest_gap
from tests.bench.gpu_shapes import DEMO, SHAPES
from tests.bench.precopy import CPU_CONTEXT, GPU_ANSWER_TOKENS, PARTS, cell_of
from tests.harness.cells.bare_cell import BareCell, TaskClient

WORKER = "tests.bench.profiled_worker"
LAYOUTS = ("tp2", "dp2")
BEGUN_TOKENS = 10
CALM_S = 0.5
NOTED_MS = 0.15
MARGIN_S = 0.1
"""After a switch is over for the coordinator, streams may still wait."""


@dataclass(frozen=True)
class Gap:
    """The longest time without a token of one stream, at one switch."""

    layout: str
    began_s: float
    ended_s: float

    @property
    def took_ms(self) -> float:
        return (self.ended_s - self.began_s) * 1e3


async def switch_under_streams(
    cell: BareCell, streams: int, tokens: int, answer_tokens: int, switches: int
) -> list[Gap]:
    """Switch to and fro; print what streams and the coordinator saw; return the longest gaps."""
    client, loop = TaskClient(), asyncio.get_running_loop()
    spans = []
    for layout in LAYOUTS:
        await asyncio.to_thread(cell.switch, layout, "recompute")
    async with client.connected(cell):
        for number in range(streams):
            ids = random.Random(number).choices(range(10, 4000), k=tokens)
            client.submit(f"x-{number}", ids, max_tokens=answer_tokens, ignore_eos=True)
        found = list(client.streams.values())
        while not all(len(stream.tokens) > BEGUN_TOKENS for stream in found):
            await asyncio.sleep(0.01)
        print(f"{streams} streams run", flush=True)
        for number in range(switches):
            await asyncio.sleep(CALM_S)
            layout, began_s = LAYOUTS[number % 2], loop.time()
            answer = await asyncio.to_thread(cell.switch, layout, "reshard")
            spans.append((layout, began_s, loop.time(), answer["switch"]["epoch"]))
        await asyncio.sleep(CALM_S)
        for name in list(client.streams):
            client.cancel(name)
    records = {each["epoch"]: each for each in cell.get("/admin/switches?last=60")["switches"]}
    worst = []
    for layout, began_s, ended_s, epoch in spans:
        until_s = ended_s + MARGIN_S
        gaps = [Gap(layout, *longest_gap(each.times, began_s, until_s)) for each in found]
        gaps.sort(key=lambda gap: gap.took_ms)
        p50, p99 = gaps[len(gaps) // 2], gaps[int(0.99 * (len(gaps) - 1))]
        parts = {part: records[epoch][part] for part in (*PARTS, "stall_ms")}
        print(f"to {layout}: p50 {p50.took_ms:.1f}, p99 {p99.took_ms:.1f} ms; {parts}", flush=True)
        worst.append(gaps[-1])
    return worst


def print_events(folder: Path, gap: Gap) -> None:
    """Print what the ranks noted in a gap, in the order in which it began."""
    print(f"== to {gap.layout}: {gap.took_ms:.1f} ms")
    for path in sorted(folder.glob("rank-*.events.json")):
        rank = path.name.split(".")[0]
        for name, began_ns, ended_ns in sorted(
            json.loads(path.read_text()), key=lambda event: int(event[1])
        ):
            began_ms, ended_ms = (each / 1e6 - gap.began_s * 1e3 for each in (began_ns, ended_ns))
            took_ms = ended_ms - began_ms
            if ended_ms > 0 and began_ms < gap.took_ms and took_ms > NOTED_MS:
                print(f"  {rank} {began_ms:8.2f} {ended_ms:8.2f} {took_ms:7.2f} {name}")


def main() -> None:
    """Switch, and print the timelines once the ranks have ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=[*SHAPES, DEMO], default=DEMO)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--switches", type=int, default=6)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["PROFILE_OUT"] = str(args.out.absolute())
    rest = CPU_CONTEXT - args.tokens  # Early copies take hundreds of steps on CPU.
    answer_tokens = rest if args.shape == DEMO else GPU_ANSWER_TOKENS
    sizes = args.streams, args.tokens, answer_tokens, args.switches
    with cell_of("on", args.shape, worker=WORKER) as cell:
        gaps = asyncio.run(switch_under_streams(cell, *sizes))
    for gap in gaps:
        print_events(args.out, gap)


if __name__ == "__main__":
    main()
