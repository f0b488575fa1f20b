"""What is cached for prompts that begin alike crosses a switch with the tasks, whole."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks-four")]

PREFIXES = 3
PREFIX_TOKENS = 640
OWN_TOKENS = 40
REQUESTS = 12
NEW_TOKENS = 6
KEPT_SHARE = 0.8


def prefix(number: int) -> list[int]:
    """A long text that many prompts begin with."""
    return random.Random(f"prefix {number}").choices(range(10, 4000), k=PREFIX_TOKENS)


@dataclass(frozen=True)
class Load:
    """What a load hit, of all that begins alike, and what it generated."""

    hit_rate: float
    tokens: list[list[int]]


async def serve(client: TaskClient, tag: str, *, at_once: int = REQUESTS) -> Load:
    """12 requests over three prefixes, so many at once; their own ends are the same each time."""
    names = [f"{tag}-{number}" for number in range(REQUESTS)]
    streams = []
    for first in range(0, REQUESTS, at_once):
        for number in range(first, first + at_once):
            own = random.Random(number).choices(range(10, 4000), k=OWN_TOKENS)
            client.submit(names[number], prefix(number % PREFIXES) + own, max_tokens=NEW_TOKENS)
        streams += await client.finish(*names[first : first + at_once])
    hits = sum(stream.cached_tokens for stream in streams)
    return Load(hits / (REQUESTS * PREFIX_TOKENS), [stream.tokens for stream in streams])


async def one_hit(client: TaskClient, name: str, number: int) -> int:
    """Cached tokens of one more request with a prefix, whose own end is like no other's."""
    own = random.choices(range(10, 4000), k=OWN_TOKENS)
    client.submit(name, prefix(number) + own, max_tokens=2)
    return (await client.finish(name))[0].cached_tokens


@pytest.mark.timeout(200)
async def test_cached_prefixes_are_hit_after_a_switch(four_ranks: BareCell) -> None:
    four_ranks.switch("tp4", "recompute")
    four_ranks.switch("dp4", "recompute")
    client = TaskClient()
    async with client.connected(four_ranks):
        cold = await serve(client, "cold", at_once=6)
        warm = await serve(client, "warm", at_once=6)
        rates = {"dp4 cold": cold.hit_rate, "dp4 warm": warm.hit_rate}
        assert warm.tokens == cold.tokens
        for layout in ("tp4", "tp2+tp2", "tp4", "dp4", "tp2+tp2", "dp4"):
            four_ranks.switch(layout, "reshard")
            hits = [await one_hit(client, f"one-{len(rates)}-{n}", n) for n in range(PREFIXES)]
            # In every layout the first request of each prefix goes where its blocks went.
            assert min(hits) == PREFIX_TOKENS, (layout, hits)
            after = await serve(client, f"{layout}-{len(rates)}", at_once=6)
            rates[f"{len(rates) - 1}: {layout}"] = after.hit_rate
            assert after.tokens == cold.tokens, layout
            assert after.hit_rate >= KEPT_SHARE * warm.hit_rate, rates
        four_ranks.switch("tp4", "recompute")
        assert [await one_hit(client, f"gone-{n}", n) for n in range(PREFIXES)] == [0] * PREFIXES
        print("\nhit rate:", {name: round(rate, 3) for name, rate in rates.items()})


@pytest.mark.timeout(200)
async def test_a_switch_among_running_and_waiting_tasks_loses_no_prefix(
    four_ranks: BareCell,
) -> None:
    four_ranks.switch("dp4", "recompute")
    client = TaskClient()
    async with client.connected(four_ranks):
        expected = await serve(client, "calm")
        for turn, layout in enumerate(("tp4", "dp4", "tp2+tp2", "tp4")):
            names = [f"busy-{turn}-{number}" for number in range(24)]
            for number, name in enumerate(names):
                other = random.Random(name).choices(range(10, 4000), k=300)
                client.submit(name, other, max_tokens=12 + number % 20)
            while not client.streams[names[0]].tokens:
                await asyncio.sleep(0.002)
            four_ranks.switch(layout, "reshard")
            if layout == "tp4":
                hits = [await one_hit(client, f"next-{turn}-{n}", n) for n in range(PREFIXES)]
                assert min(hits) == PREFIX_TOKENS, hits
            await client.finish(*names)
            assert (await serve(client, f"after-{turn}")).tokens == expected.tokens
