"""KV pages in host memory of four ranks: each layout reads what each other one has stored."""

import random
from collections.abc import Iterator

import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

BLOCK_TOKENS = 32
PROMPT_TOKENS = 200
LAYOUTS = ("dp4", "tp2+tp2", "pp4", "tp4", "pp2+pp2", "pp2tp2", "sp4", "sp2tp2")
"""The last one is mixed: pairs of ranks share heads within a pair, and tokens between pairs."""


@pytest.fixture(scope="module", params=["worker", "tests.harness.faults.aside_worker"])
def cell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareCell]:
    """Copies are part of steps, or beside them as on CUDA."""
    with bare_cell(
        tmp_path_factory.mktemp("host-four"),
        ranks=4,
        mixed=("sp2tp2",),
        worker=request.param,
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
        model=model_of("four-layers", tmp_path_factory.mktemp("model")),
        limits={"host_kv_gib": 0.25, "pipelines": ["pp2", "pp4", "pp2tp2"]},
    ) as running:
        yield running


async def test_each_layout_reads_what_each_other_one_has_stored(cell: BareCell) -> None:
    """`recompute` empties the ranks' caches, so every hit comes from host pages."""
    client = TaskClient()
    full = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    stored: dict[str, list[int]] = {}
    async with client.connected(cell):

        async def serve(name: str, of: str) -> tuple[list[int], int]:
            prompt = random.Random(of).choices(range(10, 4000), k=PROMPT_TOKENS)
            client.submit(name, prompt, max_tokens=12)
            (stream,) = await client.finish(name)
            return stream.tokens, stream.cached_tokens

        for layout in LAYOUTS:
            cell.switch(layout, "recompute")
            stored[layout], cached = await serve(f"stored-{layout}", layout)
            assert cached == 0
        for number, layout in enumerate(LAYOUTS):
            cell.switch(LAYOUTS[number - 1], "recompute")
            cell.switch(layout, "recompute")
            for origin in (each for each in LAYOUTS if each != layout):
                found = await serve(f"{origin}-in-{layout}", origin)
                assert found == (stored[origin], full), (origin, layout)
