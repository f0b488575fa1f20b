"""A rank is killed under long streams: what it had, what of that is found, how long it took."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.gauges import settled_total, total
from tests.harness.cells.lost_ranks import (
    all_serve,
    begun,
    kill,
    longest_pauses,
    pids_of,
    ranks_of,
    tell_pauses,
    until,
)
from tests.harness.vllm.known_shapes import LLAMA_8B, QWEN3_32B

SHAPES = {"8b": (LLAMA_8B, 38), "32b": (QWEN3_32B, 62)}
"""Of models, and GiB of KV: a survivor has room for all streams beside what it had of them."""


@contextmanager
def cell_of(folder: Path, size: str, **limits: Any) -> Iterator[BareCell]:
    """Run two ranks on two GPUs that load dummy weights of this size."""
    shape, kv_gib = SHAPES[size]
    engine_args = [
        *("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "4096"),
        *("--max-num-seqs", "128", "--kv-cache-memory-bytes", str(kv_gib << 30)),
        *("--gpu-memory-utilization", "0.95"),
    ]
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shape))
    with bare_cell(
        folder, ranks=2, engine_args=engine_args, model=model, device="cuda", limits=limits
    ) as cell:
        yield cell


@dataclass(frozen=True, slots=True)
class Load:
    """Streams under which a rank is lost; sizes in tokens."""

    streams: int = 64
    prompt: int = 2_000
    answer: int = 600
    begun: int = 100
    """All streams have got this much before the loss."""
    block: int = 16
    vocab: int = 100_000

    def prompt_of(self, name: str) -> list[int]:
        """Return the prompt of a stream, always the same."""
        return random.Random(name).choices(range(10, self.vocab), k=self.prompt)

    def submit(self, client: TaskClient, tag: str) -> list[str]:
        """Ask for all streams, whose names begin with the tag; returns these."""
        names = [f"{tag}-{number}" for number in range(self.streams)]
        for name in names:
            client.submit(name, self.prompt_of(name), max_tokens=self.answer, ignore_eos=True)
        return names


@dataclass(frozen=True, slots=True)
class Loss:
    """What a loss came to; times in seconds."""

    known_s: float
    """When the coordinator knew, since it was killed."""
    pauses_s: list[float]
    """The longest pause of each stream."""
    back_s: float
    """When the rank served again, since it was killed."""
    full: int
    """Tokens in full blocks of the streams that went on elsewhere."""
    found: int
    """Those of them that were not computed again."""


async def lose_one(
    cell: BareCell, client: TaskClient, tag: str, load: Load, source: str, victim: int
) -> Loss:
    """Kill one of two ranks in the middle of all streams.

    `source` is the gauge that counts the tokens which the other one finds.
    """
    survivor = 1 - victim
    names = load.submit(client, tag)
    await begun(client, names, load.begun)
    hits = await settled_total(cell, source, survivor)
    group = cell.get("/admin/layout")["groups"][0]["ranks"]
    had = {name: len(client.streams[name].tokens) for name in names}
    killed_s = time.monotonic()
    known_s = await asyncio.to_thread(kill, cell, victim, pids_of(cell)[victim])
    back = asyncio.create_task(asyncio.to_thread(_back_after, cell, victim, killed_s))
    streams = await client.finish(*names)
    assert all(len(stream.tokens) == load.answer for stream in streams)
    again = [name for name in names if client.streams[name].resumed]
    had |= {name: len(client.submitted(name).delivered_tokens) for name in again}
    # A leader that survives has the tasks of its group, and clients hear nothing.
    moved = names if survivor == group[0] and victim in group else again
    assert len(moved) >= load.streams // 4
    full = sum((load.prompt + had[name] - 1) // load.block * load.block for name in moved)
    found = await total(cell, source, hits + full) - hits
    tell_pauses(tag, streams)
    loss = Loss(known_s, longest_pauses(streams), await back, full, found)
    print(f"known after {known_s * 1e3:.0f} ms, back after {loss.back_s:.1f} s")
    print(f"{len(moved)} streams go on elsewhere, {full} tokens in full blocks, {found} found")
    return loss


def _back_after(cell: BareCell, victim: int, killed_s: float) -> float:
    """Wait until a lost rank serves again; returns the seconds since it was killed."""
    until(cell, "back", lambda _: ranks_of(cell)[victim]["available"])
    until(cell, "serving", all_serve)
    return time.monotonic() - killed_s
