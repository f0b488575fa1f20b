"""What tests of lost, stuck and slow ranks share: exact streams as load, waiting for views."""

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from coordinator.model.settings import LATE_OUT_MS
from tests.harness.cells.admin import post
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.log_events import events_of

TASKS = 8
TOKENS = 160
BEGUN_TOKENS = 20
"""All streams have so many when something is broken."""
BACK_LIMIT_S = 120.0
SHARED_MEMORY = Path("/dev/shm")
HASTY: dict[str, Any] = {"led_by": "tests.harness.cells.hasty_coordinator"}
SOON = {"stuck_after_ms": 100}
"""Half a second longer than that the launcher waits for others that end with a lost rank."""


@contextmanager
def four_ranks(
    folder: Path,
    *,
    engine_args: tuple[str, ...] = (),
    limits: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[BareCell]:
    """Four ranks in fp32, so that tokens must be identical; nothing is left of them.

    Who is lost comes back sooner than in the product.
    """
    with bare_cell(
        folder,
        ranks=4,
        engine_args=["--dtype", "float32", "--max-model-len", "1024", *engine_args],
        limits={**SOON, **(limits or {})},
        **{**HASTY, **options},
    ) as running:
        yield running
    started = events_of(running.log("worker"), "rank_started")
    assert len(started) >= 4
    assert [each for each in started if Path(f"/proc/{each['pid']}").exists()] == []
    names = [path.name for path in SHARED_MEMORY.iterdir()]
    for each in started:
        own = tuple(f"aileron-{kind}-{each['pid']}-" for kind in ("board", "plane"))
        assert not [name for name in names if name.startswith(own)]


async def calm_tokens(cell: BareCell) -> list[list[int]]:
    """Each task's tokens when nothing goes wrong."""
    client = TaskClient()
    async with client.connected(cell):
        return tokens_of(await client.finish(*submit(client, "calm")))


def ranks_of(cell: BareCell) -> list[dict[str, Any]]:
    return list(cell.get("/admin/ranks")["ranks"])


def pids_of(cell: BareCell) -> dict[int, int]:
    return {rank["rank"]: int(rank["pid"]) for rank in ranks_of(cell)}


def until(cell: BareCell, what: str, condition: Any) -> float:
    """Wait until the coordinator's views satisfy the condition; returns the seconds."""
    started = time.monotonic()
    while not condition(cell):
        views = cell.get("/admin/layout"), ranks_of(cell)
        assert time.monotonic() - started < BACK_LIMIT_S, f"not {what}: {views}"
        time.sleep(0.02)
    return time.monotonic() - started


def all_serve(cell: BareCell) -> bool:
    layout = cell.get("/admin/layout")
    return bool(layout["serving"]) and "off" not in layout["layout"]


def renew(cell: BareCell) -> None:
    """Start all ranks again, together."""
    before = {rank["incarnation"] for rank in ranks_of(cell)}
    status, answer = post(cell.admin + "/admin/renew", {})
    assert status == 200, answer
    until(cell, "all new", lambda _: before.isdisjoint(r["incarnation"] for r in ranks_of(cell)))
    until(cell, "serving", all_serve)


def submit(client: TaskClient, tag: str, tokens: int = TOKENS, **params: Any) -> list[str]:
    """Ask for all streams; longer ones begin with the same tokens, greedy and seeded in turn."""
    names = [f"{tag}-{number}" for number in range(TASKS)]
    for number, name in enumerate(names):
        prompt = [10 + (number * 37 + place) % 4000 for place in range(20 + 7 * number)]
        temperature = 0.8 if number % 2 else 0.0
        client.submit(
            name, prompt, max_tokens=tokens, temperature=temperature, seed=number, **params
        )
    return names


def serves(layout: str) -> Callable[[BareCell], bool]:
    """What tells whether this layout serves."""

    def is_so(cell: BareCell) -> bool:
        view: dict[str, Any] = cell.get("/admin/layout")
        return bool(view["serving"]) and view["layout"] == layout

    return is_so


def is_cut_out(cell: BareCell, rank: int) -> bool:
    """The layout has no place for the rank, which has not ended as far as is known."""
    groups = cell.get("/admin/layout")["groups"]
    return rank not in [each for group in groups for each in group["ranks"]]


def kill(cell: BareCell, rank: int, pid: int) -> float:
    """SIGKILL a rank and wait until the coordinator knows; returns the seconds.

    By the rank's silence alone it would know after `lost_after_ms`.
    """
    os.kill(pid, signal.SIGKILL)
    seen_s = until(cell, "seen", lambda _: ranks_of(cell)[rank]["exited"])
    assert seen_s < cell.config.coordinator.lost_after_ms / 1e3
    return seen_s


async def begun(client: TaskClient, names: list[str], tokens: int = BEGUN_TOKENS) -> None:
    """Wait until all streams have so many tokens, and see that some are not over."""
    while any(len(client.streams[name].tokens) < tokens for name in names):
        failures = [client.streams[name].failure for name in names]
        assert not any(failures), failures
        await asyncio.sleep(0.005)
    assert not all(client.streams[name].finished for name in names)


async def run_out_of_room(
    cell: BareCell, wanted: Path, rank: int, tag: str, tokens: int = TOKENS
) -> list[Stream]:
    """Let a step find no room under load, by the file `wanted`; returns the streams' ends."""
    client = TaskClient()
    async with client.connected(cell):
        names = submit(client, tag, tokens)
        await begun(client, names)
        wanted.touch()
        out_s = await asyncio.to_thread(until, cell, "left out", lambda _: is_cut_out(cell, rank))
        print(f"no room for a step of rank {rank} in {tag}: left out {out_s * 1e3:.0f} ms later")
        assert ranks_of(cell)[rank]["out_ms"] <= LATE_OUT_MS[0]
        streams = await client.finish(*names)
    assert not wanted.exists(), "it did not run out of memory."
    return streams


def longest_pauses(streams: list[Stream]) -> list[float]:
    """Return the longest pause of each of these streams, in seconds."""
    return [max(b - a for a, b in pairwise(stream.times)) for stream in streams]


def tell_pauses(tag: str, streams: list[Stream]) -> float:
    """Print the pauses of these streams; returns the longest, in seconds."""
    pauses = longest_pauses(streams)
    print(
        f"{tag}: longest pause of a stream {max(pauses) * 1e3:.0f} ms, median "
        f"{statistics.median(pauses) * 1e3:.0f} ms, "
        f"submitted again {sum(stream.resumed for stream in streams)}"
    )
    return max(pauses)


def back(cell: BareCell, tag: str) -> None:
    """All ranks serve again, and their pages add up with nothing held."""
    took_s = until(cell, "back", all_serve)
    print(f"{tag}: all ranks serve {took_s:.1f} s after the last stream ended")

    def is_full(_: BareCell) -> bool:
        groups = cell.get("/admin/layout")["groups"]
        return all(group["pages_free"] == group["pages_total"] > 0 for group in groups)

    until(cell, "idle with all pages", is_full)
    cell.pages()


def tokens_of(streams: list[Stream]) -> list[list[int]]:
    return [stream.tokens for stream in streams]


def pid_of(cell: BareCell, rank: int) -> int:
    return int(ranks_of(cell)[rank]["pid"])


async def streams_through_kill(
    cell: BareCell, tag: str, rank: int, switch_to: str = "", after_s: float = 0.0
) -> list[Stream]:
    """Kill a rank in the middle of all streams, or so long after a switch was asked for.

    All others live on, wherever they were.
    """
    client, pid = TaskClient(), pid_of(cell, rank)
    others = [each["pid"] for each in ranks_of(cell) if each["rank"] != rank]
    async with client.connected(cell):
        names = submit(client, tag)
        await begun(client, names)
        if switch_to:
            await asyncio.to_thread(cell.ask, switch_to, "reshard")
            await asyncio.sleep(after_s)
            phases = [each["phase"] for each in ranks_of(cell)]
            tag = f"{tag} after {after_s * 1e3:.0f} ms, ranks at {' '.join(phases)}"
        seen_s = await asyncio.to_thread(kill, cell, rank, pid)
        streams = await client.finish(*names)
    print(f"{tag}: exit seen after {seen_s * 1e3:.0f} ms")
    tell_pauses(tag, streams)
    assert [each["pid"] for each in ranks_of(cell) if each["rank"] != rank] == others
    return streams


async def streams_while(
    cell: BareCell, tag: str, lose: Callable[[], Awaitable[None]]
) -> list[Stream]:
    """Ask for streams again and again while ranks are lost; returns all at their end."""
    client = TaskClient()
    found: list[Stream] = []
    async with client.connected(cell):

        async def waves(number: int) -> None:
            count = 0
            while not losing.done():
                found.extend(await client.finish(*submit(client, f"{tag} {number}.{count}")))
                count += 1

        async def lose_and_see() -> None:
            await begun(client, list(client.streams))
            await lose()
            unfinished = [each for each in client.streams.values() if not each.finished]
            assert unfinished, "nobody was served when the group was formed again"

        # Never all at once are over: the second ones begin in the middle of the first.
        first = submit(client, f"{tag} first")
        losing = asyncio.create_task(lose_and_see())
        others = asyncio.create_task(waves(0))
        found.extend(await client.finish(*first))
        await asyncio.gather(waves(1), others, losing)
    return found
