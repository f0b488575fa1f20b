"""The next process of a killed rank has the prefixes that the one before it had cached."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.gauges import all_there, settled_total
from tests.harness.cells.log_events import events_of
from tests.harness.cells.lost_ranks import all_serve, kill, pids_of, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

VICTIM = 1
BLOCK_TOKENS = 32
PROMPTS = 8
PROMPT_TOKENS, TOKENS = 300, 20
FULL_TOKENS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
HOST_GIB = 0.05


@pytest.fixture(params=[0.0, HOST_GIB], ids=["device alone", "with host pages"])
def cell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BareCell]:
    arguments = ["--dtype", "float32", "--max-model-len", "1024"]
    limits = {"host_kv_gib": request.param}
    with bare_cell(tmp_path, ranks=2, engine_args=arguments, limits=limits) as running:
        yield running


async def run_all(client: TaskClient, tag: str) -> list[Stream]:
    names = [f"{tag}-{number}" for number in range(PROMPTS)]
    for number, name in enumerate(names):
        prompt = random.Random(number).choices(range(10, 4000), k=PROMPT_TOKENS)
        client.submit(name, prompt, max_tokens=TOKENS)
    return await client.finish(*names)


async def test_prompts_are_hit_where_they_were_cached(cell: BareCell) -> None:
    await all_there(cell)
    client = TaskClient()
    async with client.connected(cell):
        before = await run_all(client, "before")
        computed = await settled_total(cell, "computed_tokens", VICTIM)
        assert computed > 2 * FULL_TOKENS, "it had some of them"
        await asyncio.to_thread(kill, cell, VICTIM, pids_of(cell)[VICTIM])
        await all_there(cell)
        await asyncio.to_thread(until, cell, "serving", all_serve)
        after = await run_all(client, "after")
        again = await settled_total(cell, "computed_tokens", VICTIM)
    assert [each.tokens for each in after] == [each.tokens for each in before]
    (inherited,) = events_of(cell.log("worker"), "blocks_inherited")
    assert inherited["blocks"] * BLOCK_TOKENS > computed - PROMPTS * (BLOCK_TOKENS + TOKENS)
    assert 0 < again < PROMPTS * (PROMPT_TOKENS - FULL_TOKENS + TOKENS), "no prompt anew"
    await crash(cell)


async def crash(cell: BareCell) -> None:
    """A process that ends by an error of its own may have written anything anywhere."""
    os.kill(pids_of(cell)[VICTIM], signal.SIGSEGV)
    await asyncio.to_thread(
        until, cell, "seen", lambda _: not cell.get("/admin/ranks")["ranks"][VICTIM]["available"]
    )
    await all_there(cell)
    await asyncio.to_thread(until, cell, "serving", all_serve)
    assert len(events_of(cell.log("worker"), "blocks_inherited")) == 1, "that of before"
