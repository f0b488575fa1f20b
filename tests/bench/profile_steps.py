"""Where the host's time of short prompts and of switches goes, on every rank of a cell.

For GPU boxes: `python -m tests.bench.profile_steps --ranks 2 --out DIR` serves prompts one after
the other in each mode, switches under streams, and prints what a client below the gateway sees. The
ranks are `tests.bench.profiled_worker`, which leaves its profile in DIR; `PROFILE_KIND` says which.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.gpu_cell import running_cell
from tests.bench.gpu_shapes import COMPILATION, as_arguments, engine_options, write_shape

TURNS = 12
SWITCHES = 12


async def in_cell(model: Path, arguments: list[str], options: argparse.Namespace) -> Any:
    """TTFT in dp and tp of a cell with profiled ranks."""
    os.environ["PROFILE_OUT"] = str(options.out.absolute())
    found: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="cell-"))
    up = running_cell(
        folder,
        ranks=options.ranks,
        model=model,
        device=options.device,
        engine_args=arguments,
        worker="tests.bench.profiled_worker",
    )
    async with up as cell:
        for layout in (f"{mode}{options.ranks}" for mode in options.modes):
            await cell.switch(layout)
            for tokens in options.tokens:
                sizes = {"tokens": tokens, "repeats": TURNS, "vocab": 4000}
                answer = await cell.measure("ttft", False, 60.0, **sizes)
                found[f"{layout} {tokens}"] = answer["values_ms"]
                print(layout, tokens, answer, flush=True)
        if options.streams:
            found["switches"] = await switched(cell, options)
    return found


async def switched(cell: Any, options: argparse.Namespace) -> Any:
    """Records of switches under streams."""
    streams = []
    for layout in ("tp", "dp"):
        await cell.switch(f"{layout}{options.ranks}", "pause")
        requests = {
            f"{layout}-{each}": cell.client.prepare(
                f"{layout}-{each}", list(range(10, 138)), options.answers
            )
            for each in range(options.streams)
        }
        streams.append(asyncio.create_task(cell.client.finish(requests)))
        await asyncio.sleep(1.0)
    for turn in range(SWITCHES):
        await cell.switch(f"{('tp', 'dp')[turn % 2]}{options.ranks}", options.carry)
        await asyncio.sleep(0.15)
    records = await cell.switches(SWITCHES)
    for each in streams:
        each.cancel()
    await cell.client.clear()
    for record in records:
        print({name: value for name, value in record.items() if value}, flush=True)
    return records


def main() -> int:
    """Run the cell and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3-70b-fp8-short")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 512], help="of a prompt")
    parser.add_argument("--streams", type=int, default=64, help="of each layout; 0: no switches")
    parser.add_argument("--answers", type=int, default=600, help="tokens of each stream's answer")
    parser.add_argument("--carry", default="pause", help="plan of the switches that are profiled")
    parser.add_argument("--modes", nargs="+", default=["dp", "tp"])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="profile-"))
    arguments = engine_options(options.shape, options.device, 0.6)
    if options.device == "cuda":
        arguments["compilation_config"] = COMPILATION
    model = write_shape(options.shape, folder)
    found = asyncio.run(in_cell(model, as_arguments(arguments), options))
    (options.out / "cell.json").write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
