"""Every mode computes what static vLLM computes: logits of every step and teacher-forced loss.

The references are plain vLLM's, tp 1 and tp 2. fp32, whose references the repository keeps, must
agree to 1e-4; bf16 must be as close to static dp as static tp is, because tp rounds partial sums
differently by nature.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.servers import MODEL
from tests.harness.vllm.reference_catalog import CATALOG, LENGTHS
from tests.harness.vllm.reference_files import Reference, compute, reference
from tests.harness.vllm.references import (
    FP32_TOLERANCE,
    LOGITS_ARGS,
    NEW_TOKENS,
    prompts_and_text,
    run_all,
)

pytestmark = pytest.mark.ranks

LAYOUTS = ("dp4", "tp2+tp2", "tp4", "tp2+dp2")


@pytest.fixture(scope="module")
def fp32_cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Four ranks in fp32."""
    arguments = ["--dtype", "float32", *LOGITS_ARGS]
    with bare_cell(tmp_path_factory.mktemp("fp32"), ranks=4, engine_args=arguments) as cell:
        yield cell


@pytest.fixture(scope="module")
def fp32_static() -> dict[int, Reference]:
    """Static vLLM in fp32, by tp size."""
    return {1: reference("demo", MODEL), 2: reference("demo-tp2", MODEL)}


@pytest.mark.timeout(600)
async def test_fp32_equals_static_vllm_in_every_layout(
    fp32_static: dict[int, Reference], fp32_cell: BareCell
) -> None:
    for layout in LAYOUTS:
        fp32_cell.switch(layout)
        streams, scores = await run_all(fp32_cell, layout, *prompts_and_text())
        for tp, expected in fp32_static.items():
            expected.check(streams, scores, FP32_TOLERANCE, f"{layout} and static tp {tp}")


@pytest.mark.timeout(300)
async def test_prefix_cache_hits_change_nothing(
    fp32_static: dict[int, Reference], fp32_cell: BareCell
) -> None:
    number = LENGTHS.index(300)
    prompt = prompts_and_text()[0][number]
    for layout in ("tp2+tp2", "tp4", "dp4"):
        fp32_cell.switch(layout)
        client = TaskClient()
        async with client.connected(fp32_cell):
            hits = 0
            # Groups take turns; a few repetitions make sure that one sees the prompt twice.
            for turn in range(8):
                name = f"prefix-{layout}-{turn}"
                client.submit(name, prompt, max_tokens=NEW_TOKENS, logprobs=-1)
                stream = (await client.finish(name))[0]
                hits += stream.cached_tokens > 0
                difference = fp32_static[1].difference(number, stream.logits)
                assert difference < FP32_TOLERANCE, (layout, turn)
        assert hits > 0, f"no prefix-cache hit in {layout}"


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_bf16_is_as_close_to_static_dp_as_static_tp_is(tmp_path: Path) -> None:
    twin = replace(CATALOG["demo"], dtype="bfloat16")
    dp, tp2 = (compute(replace(twin, tp=tp), MODEL, tmp_path) for tp in (1, 2))
    tp_error = np.abs(tp2["scores"] - dp["scores"])
    folder = tmp_path / "cell"
    folder.mkdir()
    arguments = ["--dtype", "bfloat16", *LOGITS_ARGS]
    with bare_cell(folder, ranks=2, engine_args=arguments) as cell:
        for layout in ("dp2", "tp2"):
            cell.switch(layout)
            streams, scores = await run_all(cell, layout, *prompts_and_text())
            error = np.abs(scores - dp["scores"])
            print(layout, "bf16 error", error.max(), "static tp2", tp_error.max())
            assert error.max() <= 1.5 * tp_error.max(), layout
            assert error.mean() <= 1.25 * tp_error.mean(), layout
            assert abs(scores.mean() - dp["scores"].mean()) < 0.01, layout
            assert streams[0].tokens[:1] == dp["tokens"][0].tolist()[:1]
