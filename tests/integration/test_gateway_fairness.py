"""Two API keys at one gateway, one of which floods it: what the other one's requests notice."""

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from coordinator.protocol.keys import ApiKey, dump_key, hash_of
from tests.harness.cells.flood_client import Flood
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240)]

PERMITS = 64
FLOODING = 2 * PERMITS
ASKED = 20
PAUSE_S = 0.05
HELD_S = 0.5
"""How long each request of the flood takes."""
SLOWER_MAX_S = 0.25
"""What the quiet tenant may lose on two cores, which client, flood and gateway share."""


@pytest.fixture(scope="module")
def gateway(
    own_cell: FakeCell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    keys = [ApiKey(hash=hash_of(f"sk-{name}"), tenant=name) for name in ("loud", "quiet")]
    path = folder / "keys.yaml"
    path.write_text("keys:\n" + "".join(map(dump_key, keys)))
    process = GatewayProcess(folder, MODEL_DIR, own_cell, keys_file=str(path), requests_max=PERMITS)
    yield process
    process.close()


async def answer(ran: Ran) -> None:
    """The cell is no bottleneck: it answers each tenant at its own pace."""
    if ran.submit.header.tenant == "loud":
        await asyncio.sleep(HELD_S)
    ran.tokens(0, [300] * 8, "length")


def times_of(client: openai.OpenAI) -> list[float]:
    """How long requests take, one after the other; none may fail."""
    times = []
    for number in range(ASKED):
        began = time.perf_counter()
        client.completions.create(model="demo", prompt=f"quiet {number}", max_tokens=8)
        times.append(time.perf_counter() - began)
        time.sleep(PAUSE_S)
    return times


def test_a_flood_of_one_key_leaves_another_its_permits(
    gateway: GatewayProcess, own_cell: FakeCell
) -> None:
    """Both ask in the same tier; the flood alone would take every permit again and again."""
    own_cell.behave = answer
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="sk-quiet", max_retries=0, timeout=30
    ) as quiet:
        calm = times_of(quiet)
        with Flood(gateway.url, "sk-loud", FLOODING) as loud:
            flooded = times_of(quiet)
    before_ms, behind_ms = (statistics.median(each) * 1e3 for each in (calm, flooded))
    print(
        f"quiet tenant: median {before_ms:.0f} ms calm, {behind_ms:.0f} ms beside a flood of "
        f"{FLOODING} requests at once, none of {ASKED} refused; slowest {max(calm) * 1e3:.0f} and "
        f"{max(flooded) * 1e3:.0f} ms; the flood: {dict(loud.ended)}"
    )
    assert loud.ended["answered"] > 0
    assert loud.ended["tier_capacity"] > 0
    assert set(loud.ended) == {"answered", "tier_capacity"}
    assert behind_ms <= before_ms + SLOWER_MAX_S * 1e3
