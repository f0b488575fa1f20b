"""A cell whose ranks hold halves of the weights: modes, refusals, and ranks that are killed."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.harness.cells.admin import post
from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.lost_ranks import back, kill, ranks_of, tell_pauses

pytestmark = [pytest.mark.slow, pytest.mark.exact, pytest.mark.timeout(600)]

RANKS = 4
STREAMS = 8
TOKENS = 120
BEGUN_TOKENS = 20
ENGINE = ["--dtype", "float32", "--max-model-len", "1024"]
PARTED = {"weight_parts": 2, "layout": "shift2tp2"}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Four ranks with a half of the weights each."""
    folder = tmp_path_factory.mktemp("parts")
    with bare_cell(folder, ranks=RANKS, engine_args=ENGINE, limits=PARTED) as up:
        yield up


def submit(client: TaskClient, tag: str) -> list[str]:
    names = [f"{tag}-{number}" for number in range(STREAMS)]
    for number, name in enumerate(names):
        ids = random.Random(number).choices(range(10, 4000), k=20 + 30 * number)
        temperature = 0.8 if number % 2 else 0.0
        client.submit(name, ids, max_tokens=TOKENS, temperature=temperature, seed=number)
    return names


@pytest.fixture(scope="module")
def expected(cell: BareCell) -> list[list[int]]:
    """What the tasks generate undisturbed."""

    async def run() -> list[list[int]]:
        client = TaskClient()
        async with client.connected(cell):
            return [each.tokens for each in await client.finish(*submit(client, "undisturbed"))]

    return asyncio.run(run())


def test_streams_go_on_exactly_from_mode_to_mode(cell: BareCell, expected: list[list[int]]) -> None:
    async def run() -> list[list[int]]:
        client = TaskClient()
        async with client.connected(cell):
            names = submit(client, "switched")
            for layout in ("tp4", "sp2tp2", "tp4", "shift2tp2", "sp2tp2", "shift2tp2"):
                await asyncio.sleep(0.1)
                await asyncio.to_thread(cell.switch, layout, "reshard")
            return [each.tokens for each in await client.finish(*names)]

    assert asyncio.run(run()) == expected
    records = cell.get("/admin/switches?last=6")["switches"]
    assert sum(record["tasks"]["recompute"] for record in records) == 0


def test_it_is_explained_what_each_step_is_computed_in(cell: BareCell) -> None:
    times = cell.get("/admin/decisions?last=1")["step_times"]
    assert [(each["width"], sorted(each["curves"])) for each in times] == [(4, ["sp2tp2", "tp"])]


@pytest.mark.parametrize("layout", ["dp4", "tp2+tp2", "sp4", "dp2+tp2"])
def test_groups_that_do_not_have_all_parts_are_refused(cell: BareCell, layout: str) -> None:
    status, answer = post(cell.admin + "/admin/layout", {"layout": layout})
    assert status >= 400
    assert "parts of the weights" in str(answer) or "--mixed" in str(answer), answer


@pytest.mark.parametrize("rank", [0, 3])
def test_a_group_that_has_lost_a_member_waits_for_it(
    cell: BareCell, expected: list[list[int]], rank: int
) -> None:
    """Nobody else can serve: its streams go on when it is back, and the others live on."""
    before = {each["rank"]: int(each["pid"]) for each in ranks_of(cell)}

    async def run() -> list[list[int]]:
        client = TaskClient()
        async with client.connected(cell):
            names = submit(client, f"without-{rank}")
            streams = [client.streams[name] for name in names]
            while sum(len(stream.tokens) >= BEGUN_TOKENS for stream in streams) < STREAMS:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(kill, cell, rank, before[rank])
            await client.finish(*names)
        tell_pauses(f"rank {rank} of four halves", streams)
        return [stream.tokens for stream in streams]

    assert asyncio.run(run()) == expected
    back(cell, f"rank {rank}")
    after = {each["rank"]: int(each["pid"]) for each in ranks_of(cell)}
    assert {each for each in after if after[each] != before[each]} == {rank}
    cell.switch("shift2tp2", "reshard")
