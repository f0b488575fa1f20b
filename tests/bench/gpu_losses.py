"""Members of a group are lost again and again under long streams: how long these pause.

`python -m tests.bench.gpu_losses --model 32b [--layout tp2] [--victims 1,1,0] [--seconds 300]
[--out FOLDER]`: one cell of two ranks, without host pages. Each loss kills the next victim when all
streams have 40 tokens, and all ranks are renewed after it. FOLDER gets the cell's logs and
losses.jsonl, a line for each loss. In the end it prints the longest pauses of all streams.

`--model demo` tries it out on CPU.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

from loadgen.report.stats import percentile
from tests.bench.gpu_shapes import DEMO
from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.device_losses import SHAPES, Load, Loss, cell_of, lose_one
from tests.harness.cells.lost_ranks import renew

GPU_LOAD = Load(answer=250, begun=40)
CPU_LOAD = Load(streams=16, prompt=100, answer=600, begun=40, block=32, vocab=4_000)
CPU_ENGINE = ("--dtype", "float32", "--max-model-len", "1024")


@contextmanager
def demo_cell(folder: Path) -> Iterator[BareCell]:
    """Run two ranks of the demo model on CPU."""
    with bare_cell(folder, ranks=2, engine_args=[*CPU_ENGINE]) as cell:
        yield cell


async def loss_of(cell: BareCell, number: int, load: Load, victim: int) -> Loss:
    client = TaskClient()
    async with client.connected(cell):
        return await lose_one(cell, client, f"loss {number}", load, "lost_hits", victim)


def main() -> None:
    """Lose ranks, and print what that came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*SHAPES, DEMO], default=DEMO)
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--victims", default="1,1,0", help="ranks, in turns")
    parser.add_argument("--seconds", type=float, default=300.0, help="no further loss after this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with ExitStack() as ends:
        folder = args.out or Path(ends.enter_context(TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        of_model = demo_cell(folder) if args.model == DEMO else cell_of(folder, args.model)
        cell = ends.enter_context(of_model)
        losses = lose_members(cell, args, folder / "losses.jsonl")
    tell(losses)


def lose_members(cell: BareCell, args: argparse.Namespace, out: Path) -> list[Loss]:
    """Lose ranks until the time is over."""
    load = CPU_LOAD if args.model == DEMO else GPU_LOAD
    losses: list[Loss] = []
    until_s = time.monotonic() + args.seconds
    for victim in cycle(map(int, args.victims.split(","))):
        if losses:
            renew(cell)
        cell.switch(args.layout, "recompute")
        losses.append(asyncio.run(loss_of(cell, len(losses), load, victim)))
        with out.open("a") as file:
            file.write(json.dumps({"victim": victim, **asdict(losses[-1])}) + "\n")
        if time.monotonic() > until_s:
            break
    return losses


def tell(losses: list[Loss]) -> None:
    """Print the pauses of all streams, and what else counts."""
    pauses_ms = sorted(each * 1e3 for loss in losses for each in loss.pauses_s)
    p50, p99 = (percentile(pauses_ms, each) for each in (50, 99))
    pauses = f"p50 {p50:.0f}, p99 {p99:.0f}, max {pauses_ms[-1]:.0f} ms"
    back_s = max(loss.back_s for loss in losses)
    short = sum(loss.found < loss.full for loss in losses)
    print(f"{len(losses)} losses: longest pause of a stream {pauses}")
    print(f"back after {back_s:.1f} s at most; full blocks computed again in {short} of them")


if __name__ == "__main__":
    main()
