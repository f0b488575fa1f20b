"""A model with experts, and with fewer KV heads than ranks, in dp, tp and sp of a real cell."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cells.bare_cell import BareCell, bare_cell
from tests.harness.cells.crossing import run
from tests.harness.vllm.reference_files import reference
from tests.harness.vllm.references import FP32_TOLERANCE, LOGITS_ARGS, run_all
from tests.harness.vllm.tiny_models import model_of

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with 16 experts and 2 KV heads."""
    return model_of("qwen3-moe", tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def cell(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Four ranks in fp32."""
    arguments = ["--dtype", "float32", *LOGITS_ARGS]
    folder = tmp_path_factory.mktemp("cell")
    with bare_cell(folder, ranks=4, engine_args=arguments, model=model) as running:
        yield running


@pytest.mark.timeout(400)
async def test_every_mode_equals_static_vllm(cell: BareCell, model: Path) -> None:
    expected = reference("qwen3-moe", model)
    for layout in ("dp4", "tp2+sp2", "sp4", "tp4"):
        cell.switch(layout)
        streams, scores = await run_all(cell, layout, expected.prompts, expected.text)
        expected.check(streams, scores, FP32_TOLERANCE, layout)


@pytest.mark.timeout(200)
async def test_tasks_whose_kv_heads_are_replicated_are_recomputed(cell: BareCell) -> None:
    """Into and out of four ranks, which share two KV heads; narrower groups move as ever."""
    cell.switch("dp4", "recompute")
    expected = await run(cell, "plain", [])
    layouts = ("tp2+tp2", "tp4", "sp4", "dp4", "sp2+dp2")
    assert await run(cell, "moved", [(layout, "reshard") for layout in layouts]) == expected
    records = cell.get("/admin/switches?last=20")["switches"]
    tasks = {each["to"]: each["tasks"] for each in records if each["carry"] == "reshard"}
    assert tasks["tp2+tp2"]["reshard"] > 0
    assert tasks["tp4"]["recompute"] > 0
    assert tasks["tp4"]["reshard"] == tasks["sp4"]["reshard"] == tasks["dp4"]["reshard"] == 0
    ways = [("tp4", "recompute"), ("sp4", "pause"), ("shift4", "pause"), ("tp4", "pause")]
    assert await run(cell, "kept", ways) == expected
    records = cell.get("/admin/switches?last=3")["switches"]
    assert [record["to"] for record in records] == ["sp4", "shift4", "tp4"]
    assert sum(record["tasks"]["recompute"] for record in records) == 0
    cell.pages()
