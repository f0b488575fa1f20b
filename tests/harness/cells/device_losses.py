"""A rank is killed under long streams: what it had, what of that is found, how long it took."""

import asyncio
import random
import time
from dataclasses import dataclass

from tests.harness.cells.bare_cell import BareCell, TaskClient
from tests.harness.cells.gauges import settled_total, total
from tests.harness.cells.lost_ranks import (
    all_serve,
    begun,
    kill,
    pids_of,
    ranks_of,
    tell_pauses,
    until,
)

STREAMS, PROMPT_TOKENS, ANSWER_TOKENS = 64, 2_000, 600
BLOCK_TOKENS = 16


def submit_all(client: TaskClient, tag: str) -> list[str]:
    names = [f"{tag}-{number}" for number in range(STREAMS)]
    for name in names:
        client.submit(name, prompt_of(name), max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return names


def prompt_of(name: str) -> list[int]:
    return random.Random(name).choices(range(10, 100_000), k=PROMPT_TOKENS)


@dataclass(frozen=True)
class Loss:
    """What a loss came to; times in seconds."""

    longest_pause_s: float
    back_s: float
    """When the rank served again, since it was killed."""
    warm: list[int]
    """The first tokens of the streams before it."""


async def kill_one(cell: BareCell, source: str, victim: int = 1) -> Loss:
    """Kill a rank in the middle of all streams.

    The tasks that go on elsewhere take all their full blocks from this source.
    """
    client, survivor = TaskClient(), 1 - victim
    async with client.connected(cell):
        names = submit_all(client, "warm")
        warm = [stream.tokens[0] for stream in await client.finish(*names)]
        names = submit_all(client, "lost")
        await begun(client, names, 100)
        hits = await settled_total(cell, source, survivor)
        group = cell.get("/admin/layout")["groups"][0]["ranks"]
        had = {name: len(client.streams[name].tokens) for name in names}
        killed_s = time.monotonic()
        seen_s = await asyncio.to_thread(kill, cell, victim, pids_of(cell)[victim])
        print(f"known after {seen_s * 1e3:.0f} ms")
        back = asyncio.create_task(asyncio.to_thread(back_after, cell, victim, killed_s))
        streams = await client.finish(*names)
        assert all(len(stream.tokens) == ANSWER_TOKENS for stream in streams)
        again = [name for name in names if client.streams[name].resumed]
        had |= {name: len(client.submitted(name).delivered_tokens) for name in again}
        # A leader that survives has the tasks of its group, and clients hear nothing.
        moved = names if survivor == group[0] and victim in group else again
        assert len(moved) >= STREAMS // 4
        full = sum((PROMPT_TOKENS + had[name] - 1) // BLOCK_TOKENS * BLOCK_TOKENS for name in moved)
        found = await total(cell, source, hits + full) - hits
        print(f"{len(moved)} streams go on elsewhere, {full} tokens in full blocks, {found} found")
        longest_s = tell_pauses("lost", streams)
        assert found >= full
    return Loss(longest_s, await back, warm)


def back_after(cell: BareCell, victim: int, killed_s: float) -> float:
    """Wait until a lost rank serves again; returns the seconds since it was killed."""
    until(cell, "back", lambda _: ranks_of(cell)[victim]["available"])
    until(cell, "serving", all_serve)
    return time.monotonic() - killed_s
