"""Ranks that end or get stuck at all kinds of moments, in all kinds of groups: `make chaos`.

Four ranks, a fresh load for each fault; every stream must be exact at its end, whatever happened.
Prefills take many steps here, so that they can be hit.
"""

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient
from tests.harness.cells.lost_ranks import (
    BACK_LIMIT_S,
    all_serve,
    back,
    begun,
    calm_tokens,
    four_ranks,
    kill,
    pid_of,
    ranks_of,
    streams_through_kill,
    submit,
    tell_pauses,
    tokens_of,
    until,
)
from tests.harness.faults.frozen import frozen_main_thread

pytestmark = [pytest.mark.ranks, pytest.mark.chaos, pytest.mark.timeout(900)]

STAGE_LIMIT_MS, STEP_LIMIT_MS = 3_000, 5_000
PREFILL_TOKENS = 700
SPREAD_S = 0.15
"""Kills in a switch come up to so long after it was asked for."""


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    with four_ranks(
        tmp_path_factory.mktemp("chaos"),
        engine_args=("--max-num-batched-tokens", "64"),
        limits={"step_limit_ms": STEP_LIMIT_MS},
        stage_limit_ms=STAGE_LIMIT_MS,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(cell: BareCell) -> list[list[int]]:
    return asyncio.run(calm_tokens(cell))


@pytest.fixture
def whole(cell: BareCell) -> BareCell:
    """The cell, which can form groups of all widths whatever an earlier test has done to it."""
    until(cell, "all serve", all_serve)
    assert not any(rank["degraded"] for rank in ranks_of(cell))
    return cell


@pytest.mark.parametrize("layout", ["tp4", "sp4", "sp2+sp2", "dp4"])
@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
async def test_killed_in_steps(
    whole: BareCell, expected: list[list[int]], layout: str, rank: int
) -> None:
    whole.switch(layout, "reshard")
    tag = f"rank {rank} of {layout} killed"
    assert tokens_of(await streams_through_kill(whole, tag, rank)) == expected
    back(whole, tag)


@pytest.mark.parametrize(
    ("origin", "wanted"), [("dp4", "tp4"), ("tp4", "dp4"), ("tp2+tp2", "sp4"), ("sp4", "tp2+dp2")]
)
@pytest.mark.parametrize("rank", [0, 3], ids=["leader", "follower"])
async def test_killed_in_a_switch_with_its_move(
    whole: BareCell, expected: list[list[int]], origin: str, wanted: str, rank: int
) -> None:
    """At a random moment: which phases the ranks were in is printed."""
    whole.switch(origin, "reshard")
    after_s = random.Random(f"{origin} {wanted} {rank}").uniform(0, SPREAD_S)
    tag = f"rank {rank} killed from {origin} to {wanted}"
    streams = await streams_through_kill(whole, tag, rank, wanted, after_s)
    assert tokens_of(streams) == expected
    back(whole, tag)


@pytest.mark.parametrize("layout", ["dp4", "tp2+tp2", "sp4"])
async def test_killed_in_a_prefill(whole: BareCell, layout: str) -> None:
    """Prompts of a dozen steps each; a leader dies when the first stream of all begins."""
    whole.switch(layout, "reshard")
    prompts = [
        [(number * 911 + place * 31) % 4000 + 5 for place in range(PREFILL_TOKENS)]
        for number in range(8)
    ]

    async def ask(client: TaskClient, tag: str) -> list[str]:
        names = [f"{tag} {number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            client.submit(name, prompt, max_tokens=24)
        return names

    client, pid = TaskClient(), pid_of(whole, 0)
    async with client.connected(whole):
        names = await ask(client, f"killed {layout}")
        # Before the calm run, which finds the prompts' KV cached.
        while not any(client.streams[name].tokens for name in names):
            await asyncio.sleep(0.001)
        begun_by = sum(bool(client.streams[name].tokens) for name in names)
        await asyncio.to_thread(kill, whole, 0, pid)
        streams = await client.finish(*names)
        calm = await client.finish(*await ask(client, f"calm {layout}"))
    print(f"killed in prefills of {layout}: {begun_by} of {len(names)} streams had begun")
    assert tokens_of(streams) == tokens_of(calm)
    back(whole, f"killed in prefills of {layout}")


def is_new(cell: BareCell, rank: int, pid: int) -> bool:
    return pid_of(cell, rank) != pid


@pytest.mark.parametrize(("layout", "rank"), [("dp4", 1), ("tp2+tp2", 0), ("tp2+tp2", 3)])
async def test_a_main_thread_that_never_goes_on(
    whole: BareCell, expected: list[list[int]], layout: str, rank: int
) -> None:
    """As in a collective that never ends: the process says that it lives, but nothing comes."""
    whole.switch(layout, "reshard")
    client, pid, tag = TaskClient(), pid_of(whole, rank), f"main thread of {rank} in {layout} held"
    async with client.connected(whole):
        names = submit(client, tag)
        await begun(client, names)

        def hold() -> float:
            with frozen_main_thread(pid) as held:
                return held.until(lambda: is_new(whole, rank, pid), BACK_LIMIT_S)

        took_s = await asyncio.to_thread(hold)
        streams = await client.finish(*names)
    print(f"{tag}: a new process is there after {took_s:.1f} s")
    tell_pauses(tag, streams)
    assert tokens_of(streams) == expected
    back(whole, tag)


async def test_a_process_that_never_goes_on(whole: BareCell, expected: list[list[int]]) -> None:
    """Stopped as a whole: its own watchdog stands still too, and the launcher ends it."""
    whole.switch("tp2+tp2", "reshard")
    client, pid, tag = TaskClient(), pid_of(whole, 2), "process of 2 in tp2+tp2 stopped for good"
    async with client.connected(whole):
        names = submit(client, tag)
        await begun(client, names)
        os.kill(pid, signal.SIGSTOP)
        took_s = await asyncio.to_thread(
            until, whole, "started anew", lambda _: is_new(whole, 2, pid)
        )
        streams = await client.finish(*names)
    print(f"{tag}: a new process is there after {took_s:.1f} s")
    tell_pauses(tag, streams)
    assert tokens_of(streams) == expected
    back(whole, tag)


async def test_a_switch_goes_on_without_a_rank_that_does_not_get_there(whole: BareCell) -> None:
    """The rank says that it lives, but acknowledges nothing; let go in time, it comes back."""
    whole.switch("dp4", "reshard")
    pid = pid_of(whole, 3)

    def hold() -> float:
        with frozen_main_thread(pid) as held:
            whole.ask("dp2+tp2", "reshard")  # A switch waits for no group that stays.
            return held.until(
                lambda: (
                    whole.get("/admin/layout")["layout"] == "dp3+off1"
                    and bool(whole.get("/admin/layout")["serving"])
                ),
                BACK_LIMIT_S,
            )

    took_s = await asyncio.to_thread(hold)
    print(f"switch with a rank that is held: served without it after {took_s:.1f} s")
    assert took_s < BACK_LIMIT_S
    back(whole, "rank that was late")
    assert pid_of(whole, 3) == pid
