"""Batch work in each fixed layout, and where the policy may alternate between two of them.

`python -m tests.bench.gpu_alternation --shape llama-3-8b [--ranks 2] [--slow-link] [--layouts
dp2,tp2,pp2] [--loads 256x512+1024,…] [--only fixed,adaptive] [--out FILE]`: one cell without a
policy runs each load in each layout, then one with the adaptive policy gets the same loads as
batch requests. All requests of a load come at once. `python -m tests.bench.gpu --kinds saturated
--loads …` has static vLLM's numbers of the same loads. `--shape four-layers --device cpu` tries it
out without a GPU.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.protocol.terms import Tier
from tests.bench.gpu import hardware, loads
from tests.bench.gpu_cell import RunningCell, running_cell
from tests.bench.gpu_run import prepare_environment
from tests.bench.gpu_shapes import (
    DEMO,
    DEMO_OF_STAGES,
    SHAPES,
    Load,
    as_arguments,
    engine_options,
    plan_for,
    write_shape,
)
from tests.harness.cells.servers import ROOT
from tests.harness.runs.provenance import commit, today

LOADS = "256x512+1024,128x2048+256,96x4096+64"
"""Of one GPU: mostly answers, both, mostly prompts."""
LOAD_LIMIT_S = 180
FIXED, ADAPTIVE = "fixed", "adaptive"
POLICY = {"name": ADAPTIVE}


async def run_load(cell: RunningCell, tag: str, load: Load, ranks: int, vocab: int) -> float:
    """Send all requests of a load at once; return the seconds until the last has ended."""
    draw = random.Random(load.name)
    requests = {
        f"{tag}-{number}": cell.client.prepare(
            f"{tag}-{number}", draw.choices(range(10, vocab), k=load.prompt), load.answer
        )
        for number in range(load.requests_per_gpu * ranks)
    }
    began = time.monotonic()
    try:
        await asyncio.wait_for(cell.client.finish(requests), LOAD_LIMIT_S)
        return time.monotonic() - began
    finally:
        await cell.client.clear()


def report(kind: str, load: Load, seconds: float, ranks: int, **more: Any) -> dict[str, Any]:
    """Print a result, and return it."""
    tokens = load.requests_per_gpu * ranks * load.answer
    row = {
        "layout": kind,
        "load": load.name,
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(tokens / seconds, 1),
        **more,
    }
    print(json.dumps(row), flush=True)
    return row


async def fixed(
    cell: RunningCell, layouts: Sequence[str], load: Load, ranks: int, vocab: int
) -> list[dict[str, Any]]:
    """The load in each layout."""
    rows = []
    for layout in layouts:
        await cell.switch(layout)
        seconds = await run_load(cell, f"{layout}-{load.name}", load, ranks, vocab)
        rows.append(report(layout, load, seconds, ranks))
    return rows


async def adaptive(cell: RunningCell, load: Load, ranks: int, vocab: int) -> dict[str, Any]:
    """The load under the policy, what it switched to, and what it says of alternation."""
    known = {each["epoch"] for each in await cell.switches(1000)}
    seconds = await run_load(cell, f"{ADAPTIVE}-{load.name}", load, ranks, vocab)
    made = [each for each in await cell.switches(1000) if each["epoch"] not in known]
    switches = [f"{each['from']} to {each['to']} by {each['carry']}" for each in made]
    seen = (await cell.get("/admin/decisions?last=1"))["alternation"]
    return report(ADAPTIVE, load, seconds, ranks, switches=switches, alternation=seen)


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The policy's time of each load over that of the best fixed layout."""
    lines = []
    for load in dict.fromkeys(row["load"] for row in rows):
        took = {row["layout"]: row["seconds"] for row in rows if row["load"] == load}
        own = took.pop(ADAPTIVE, None)
        if own is not None and took:
            best = min(took, key=lambda layout: took[layout])
            lines.append(f"{load}: adaptive {own / took[best]:.3f} of the time of {best}, the best")
    return lines


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one cell after the other."""
    prepare_environment(None, options.device, ROOT)
    ranks, layouts = options.ranks, options.layouts.split(",")
    vocab = plan_for(options.shape, quick=True).vocab
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        engine = engine_options(options.shape, options.device, options.gpu_memory_utilization)
        if options.slow_link:
            engine["disable_custom_all_reduce"] = True
        for kind in options.only.split(","):
            (root / kind).mkdir()
            async with running_cell(
                root / kind,
                ranks=ranks,
                model=write_shape(options.shape, root / f"{kind}-model"),
                device=options.device,
                engine_args=as_arguments(engine),
                settings={
                    "layout": layouts[0],
                    "pipelines": [each for each in layouts if each.startswith("pp")],
                    "peer_access": "off" if options.slow_link else "auto",
                },
                policy=POLICY if kind == ADAPTIVE else {},
            ) as cell:
                print(f"{kind}: serves after {cell.start_s} s", flush=True)
                cell.client.tier = Tier.BATCH
                for load in options.loads:
                    if kind == FIXED:
                        rows += await fixed(cell, layouts, load, ranks, vocab)
                    else:
                        rows.append(await adaptive(cell, load, ranks, vocab))
    return rows


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--shape", choices=[*SHAPES, DEMO, DEMO_OF_STAGES], default="llama-3-8b")
    add("--ranks", type=int, default=2)
    add("--slow-link", action="store_true", help="without peer access, as between PCIe cards")
    add("--layouts", default="dp2,tp2,pp2")
    add("--loads", type=loads, default=loads(LOADS), help="per GPU: requests x prompt + answer")
    add("--only", default=f"{FIXED},{ADAPTIVE}")
    add("--gpu-memory-utilization", type=float, default=0.85)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--out", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    print("\n".join(summary(rows)), flush=True)
    if options.out:
        facts = {"date": today(), "commit": commit(), "hardware": hardware(options.ranks)}
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
