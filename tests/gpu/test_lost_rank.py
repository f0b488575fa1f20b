"""SIGKILL or SIGSTOP of a member of a wide group: the other one gets out of their step and serves.

On GPUs the group is closed then, until all ranks are renewed. Needs two NVIDIA GPUs, or one and
NCCL 2.30, and vLLM's CUDA build: `python -m pytest -m gpu tests/gpu`. On CPU, where nothing has to
be renewed, `make chaos` runs the same, which shows that these tests can be trusted.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tests.harness.cells import devices
from tests.harness.cells.admin import post
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.lost_ranks import (
    back,
    is_cut_out,
    kill,
    pids_of,
    ranks_of,
    renew,
    tell_pauses,
    until,
)

pytestmark = [pytest.mark.timeout(400)]

RANKS = 2
STREAMS = 16
TOKENS = 300
BEGUN_TOKENS = 20
LONG_PROMPT = 960
FEW_TOKENS = 40
LEASE_MS, LOST_AFTER_MS = 2_500, 3_000
SILENT_S = LOST_AFTER_MS / 1e3
PAUSE_LIMIT_S = {"cuda": 3.0, "cpu": 12.0}
"""What is promised after detection; on CPU a machine with other work to do may miss that."""


@pytest.fixture(
    scope="module",
    params=devices.BOTH,
)
def cell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareCell]:
    device = request.param
    engine, limits = devices.cell_on(device, RANKS, devices.CUDA_ENGINE)
    folder = tmp_path_factory.mktemp("lost")
    with bare_cell(
        folder,
        ranks=RANKS,
        engine_args=engine,
        device=device,
        limits=limits,
        lease_ms=LEASE_MS,
        lost_after_ms=LOST_AFTER_MS,
    ) as up:
        yield up


@pytest.fixture
def whole(cell: BareCell) -> BareCell:
    """The cell, which can form all groups whatever an earlier test has done to it."""
    if any(rank["degraded"] for rank in ranks_of(cell)):
        renew(cell)
    return cell


def is_cuda(cell: BareCell) -> bool:
    return cell.config.cell.device == "cuda"


def submit(client: TaskClient, tag: str, prompt_tokens: int, tokens: int) -> list[str]:
    names = [f"{tag}-{number}" for number in range(STREAMS)]
    for number, name in enumerate(names):
        ids = random.Random(number).choices(range(10, 4000), k=prompt_tokens + number)
        temperature = 0.8 if number % 2 else 0.0
        client.submit(name, ids, max_tokens=tokens, temperature=temperature, seed=number)
    return names


async def begun(streams: list[Stream], tokens: int, *, count: int) -> None:
    """Wait until so many streams have so many tokens."""
    while sum(len(stream.tokens) >= tokens for stream in streams) < count:
        assert not [stream.failure for stream in streams if stream.failure]
        await asyncio.sleep(0.001)
    assert not all(stream.finished for stream in streams)


async def lose(
    cell: BareCell, rank: int, layout: str, *, prompt_tokens: int, tokens: int, in_prefill: bool
) -> None:
    """Kill a rank under load: no stream notices, and the other rank is the process that it was."""
    tag = f"rank {rank} in {layout}, prompts of {prompt_tokens}"
    await asyncio.to_thread(cell.switch, layout, "recompute")
    before = pids_of(cell)
    pause_s = await pause_in(
        *(cell, tag, prompt_tokens, tokens),
        lambda: kill(cell, rank, before[rank]),
        in_prefill=in_prefill,
    )
    assert pause_s < PAUSE_LIMIT_S[cell.config.cell.device]
    back(cell, tag)
    after = pids_of(cell)
    assert after[1 - rank] == before[1 - rank], "the other one lives on"
    assert after[rank] != before[rank]
    assert "rank_stuck" not in cell.log("worker")
    assert "unblock_failed" not in cell.log("worker")


async def pause_in(
    cell: BareCell,
    tag: str,
    prompt_tokens: int,
    tokens: int,
    break_it: Callable[[], object],
    *,
    in_prefill: bool = False,
) -> float:
    """Break something under load; all streams end whole. Returns the longest pause in seconds."""
    client = TaskClient()
    async with client.connected(cell):
        names = submit(client, tag, prompt_tokens, tokens)
        streams = [client.streams[name] for name in names]
        if in_prefill:
            await begun(streams, 1, count=1)
        else:
            await begun(streams, BEGUN_TOKENS, count=STREAMS)
        await asyncio.to_thread(break_it)
        await client.finish(*names)
    assert [stream.failure for stream in streams if stream.failure] == []
    assert [len(stream.tokens) for stream in streams] == [tokens] * STREAMS
    return tell_pauses(tag, streams)


def form_again(cell: BareCell, layout: str, survivor: int, *, was_stuck: bool = True) -> None:
    """On CUDA the group is closed, and refused until all ranks are renewed.

    A leader that stops between two steps leaves nobody in a collective, so its group stays open.
    """
    closed = ranks_of(cell)[survivor]["closed"]
    status, answer = post(cell.admin + "/admin/layout", {"layout": layout})
    if is_cuda(cell) and (was_stuck or closed):
        assert closed == [[0, 1]]
        assert status >= 400, answer
        assert "aileron renew" in str(answer)
        renew(cell)
    cell.switch(layout, "recompute")
    assert not any(rank["closed"] or rank["degraded"] for rank in ranks_of(cell))
    assert cell.get("/admin/layout")["layout"] == layout


async def all_end(cell: BareCell, tag: str) -> None:
    """The layout that was formed again computes."""
    client = TaskClient()
    async with client.connected(cell):
        streams = await client.finish(*submit(client, tag, 20, FEW_TOKENS))
    assert [len(stream.tokens) for stream in streams] == [FEW_TOKENS] * STREAMS


@pytest.mark.parametrize(("rank", "layout"), [(1, "tp2"), (0, "tp2"), (1, "sp2")])
def test_a_group_loses_a_member_in_the_middle_of_decodes(
    whole: BareCell, rank: int, layout: str
) -> None:
    asyncio.run(lose(whole, rank, layout, prompt_tokens=20, tokens=TOKENS, in_prefill=False))
    form_again(whole, layout, 1 - rank)
    asyncio.run(all_end(whole, f"{layout} behind rank {rank}"))


@pytest.mark.parametrize("layout", ["tp2", "sp2"])
def test_a_group_loses_a_member_in_the_middle_of_long_prompts(whole: BareCell, layout: str) -> None:
    """Their steps sum up large messages, which NCCL does, and exchange them in sp."""
    sizes = {"prompt_tokens": LONG_PROMPT, "tokens": FEW_TOKENS}
    asyncio.run(lose(whole, 1, layout, **sizes, in_prefill=True))
    form_again(whole, layout, 0)


@pytest.mark.parametrize(("rank", "layout"), [(1, "tp2"), (0, "tp2"), (1, "sp2")])
def test_a_member_stands_still_and_goes_on_later(whole: BareCell, rank: int, layout: str) -> None:
    """SIGSTOP, and SIGCONT when the other one serves. On CUDA it may be stuck in its step then.

    So there it is another process in the end if it was, and the one that it was if not.
    """
    tag = f"rank {rank} in {layout} stopped"
    whole.switch(layout, "recompute")
    before = pids_of(whole)

    def stop() -> None:
        os.kill(before[rank], signal.SIGSTOP)
        seen_s = until(whole, "cut out", lambda _: is_cut_out(whole, rank))
        print(f"{tag}: cut out after {seen_s:.2f} s")

    try:
        pause_s = asyncio.run(pause_in(whole, tag, 20, TOKENS, stop))
        assert is_cut_out(whole, rank)
    finally:
        with suppress(ProcessLookupError):
            os.kill(before[rank], signal.SIGCONT)
    assert pause_s < SILENT_S + PAUSE_LIMIT_S[whole.config.cell.device]
    back(whole, tag)
    after = pids_of(whole)
    print(
        f"{tag}: {'the same process' if after[rank] == before[rank] else 'a new process'} is back"
    )
    assert after[1 - rank] == before[1 - rank], "the other one lives on"
    form_again(whole, layout, 1 - rank, was_stuck=after[rank] != before[rank])
    asyncio.run(all_end(whole, f"{layout} behind {rank} that stood still"))
