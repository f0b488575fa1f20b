"""KV is copied before groups are left: streams stay exact, and the switch itself moves little."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.random_load import RANDOM_ARGS
from tests.harness.cells.shared import PATIENCE
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks-four")]

TASKS = 8
TOKENS = 400
SWITCHES = ("tp4", "dp4", "tp2+tp2", "tp4", "tp2+dp2", "dp4")


SWITCHES_OF_STAGES = ("pp4", "dp4", "pp2+pp2", "tp4", "pp2tp2", "dp4")


@pytest.fixture(scope="module", params=[SWITCHES, SWITCHES_OF_STAGES], ids=["plain", "stages"])
def copying(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[BareCell, tuple[str, ...]]]:
    """Four ranks that copy KV before they leave their groups, and the switches to make."""
    has_stages = request.param is SWITCHES_OF_STAGES
    folder = tmp_path_factory.mktemp("precopy")
    with bare_cell(
        folder,
        ranks=4,
        model=model_of("four-layers" if has_stages else "demo", folder / "model"),
        engine_args=[*RANDOM_ARGS],
        limits={"pipelines": ["pp2", "pp4", "pp2tp2"]} if has_stages else {},
        precopy="on",
        **PATIENCE,
    ) as cell:
        yield cell, request.param


async def streams_of(cell: BareCell, tag: str, layouts: tuple[str, ...]) -> list[list[int]]:
    """The tokens of tasks that run through `reshard` switches to these layouts."""
    client = TaskClient()
    async with client.connected(cell):
        names = [f"{tag}-{number}" for number in range(TASKS)]
        for number, name in enumerate(names):
            prompt = random.Random(number).choices(range(10, 4000), k=40 + 60 * number)
            temperature = 0.8 if number % 2 else 0.0
            client.submit(name, prompt, max_tokens=TOKENS, temperature=temperature, seed=number)
        while layouts and not all(client.streams[name].tokens for name in names):
            await asyncio.sleep(0.01)
        for layout in layouts:
            await asyncio.to_thread(cell.switch, layout, "reshard")
            await asyncio.sleep(0.2)
        return [stream.tokens for stream in await client.finish(*names)]


@pytest.mark.timeout(240)
async def test_streams_are_exact_where_most_kv_is_copied_before_the_switch(
    copying: tuple[BareCell, tuple[str, ...]],
) -> None:
    cell, switches = copying
    precopied = await streams_of(cell, "precopied", switches)
    records: list[dict[str, Any]] = [
        each
        for each in cell.get("/admin/switches?last=40")["switches"]
        if each["carry"] == "reshard" and each["tasks"]["reshard"]
    ]
    assert len(records) >= 4, records
    assert not any(each["tasks"]["recompute"] for each in records), records
    early = sum(each["precopy_bytes"] for each in records)
    late = sum(each["reshard_bytes"] for each in records)
    assert all(each["precopy_rounds"] > 0 for each in records), records
    assert early > 4 * late, f"{early} bytes before the switches, {late} in them: {records}"
    cell.pages()
    assert precopied == await streams_of(cell, "calm", ())
