"""Every mode computes what static vLLM computes: logits of every step and teacher-forced loss.

The reference is plain vLLM in processes of its own, tp 1 and tp 2. fp32 must agree to 1e-4; bf16
must be as close to static dp as static tp is, because tp rounds partial sums differently by nature.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.vllm.references import (
    FP32_TOLERANCE,
    LENGTHS,
    LOGITS_ARGS,
    NEW_TOKENS,
    largest_difference,
    prompts_and_text,
    run_all,
    static,
)

pytestmark = [pytest.mark.slow, pytest.mark.exact]

LAYOUTS = ("dp4", "tp2+tp2", "tp4", "tp2+dp2")


@pytest.fixture(scope="module")
def fp32_cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Four ranks in fp32."""
    arguments = ["--dtype", "float32", *LOGITS_ARGS]
    with bare_cell(tmp_path_factory.mktemp("fp32"), ranks=4, engine_args=arguments) as cell:
        yield cell


@pytest.fixture(scope="module")
def fp32_static(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Static vLLM in fp32, by tp size."""
    folder = tmp_path_factory.mktemp("static")
    return {tp: static(folder, tp=tp) for tp in (1, 2)}


@pytest.mark.timeout(600)
async def test_fp32_equals_static_vllm_in_every_layout(
    fp32_static: dict[int, dict[str, Any]], fp32_cell: BareCell
) -> None:
    report = {}
    for layout in LAYOUTS:
        fp32_cell.switch(layout)
        streams, scores = await run_all(fp32_cell, layout)
        for tp, reference in fp32_static.items():
            for number, stream in enumerate(streams):
                assert stream.tokens == reference[f"tokens_{number}"].tolist(), (layout, number)
            logits = largest_difference(streams, reference)
            loss = abs(float(scores.mean() - reference["scores_0"].mean()))
            report[layout, tp] = (logits, loss)
            assert logits < FP32_TOLERANCE, (layout, tp, logits)
            assert np.abs(scores - reference["scores_0"]).max() < FP32_TOLERANCE, (layout, tp)
    print("largest logit and loss differences by (layout, static tp):", report)


@pytest.mark.timeout(300)
async def test_prefix_cache_hits_change_nothing(
    fp32_static: dict[int, dict[str, Any]], fp32_cell: BareCell
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
                rows = np.stack(stream.logits)
                expected = fp32_static[1][f"logits_{number}"]
                assert np.abs(rows - expected).max() < FP32_TOLERANCE, (layout, turn)
        assert hits > 0, f"no prefix-cache hit in {layout}"


@pytest.mark.timeout(600)
async def test_bf16_is_as_close_to_static_dp_as_static_tp_is(tmp_path: Path) -> None:
    references = {tp: static(tmp_path, dtype="bfloat16", tp=tp) for tp in (1, 2)}
    dp = references[1]
    tp_error = np.abs(references[2]["scores_0"] - dp["scores_0"])
    folder = tmp_path / "cell"
    folder.mkdir()
    arguments = ["--dtype", "bfloat16", *LOGITS_ARGS]
    with bare_cell(folder, ranks=2, engine_args=arguments) as cell:
        for layout in ("dp2", "tp2"):
            cell.switch(layout)
            streams, scores = await run_all(cell, layout)
            error = np.abs(scores - dp["scores_0"])
            print(layout, "bf16 error", error.max(), "static tp2", tp_error.max())
            assert error.max() <= 1.5 * tp_error.max(), layout
            assert error.mean() <= 1.25 * tp_error.mean(), layout
            assert abs(scores.mean() - dp["scores_0"].mean()) < 0.01, layout
            assert streams[0].tokens[:1] == dp["tokens_0"].tolist()[:1]
