"""Text of multimodal models: dp, tp and sp compute what the text model with these weights does.

The references are those of the text families. torchvision is a stand-in, since text never calls it.
"""

import asyncio
from pathlib import Path

import pytest

from tests.harness.cells.bare_cell import bare_cell
from tests.harness.vllm.answers import ENGINE_ARGS, answers
from tests.harness.vllm.multimodal_models import MULTIMODAL, Multimodal, make_multimodal
from tests.harness.vllm.reference_files import reference
from tests.harness.vllm.references import FP32_TOLERANCE
from tests.harness.vllm.text_worker import FOLDER
from tests.harness.vllm.torchvision_stand_in import write_stand_in

pytestmark = pytest.mark.ranks


@pytest.mark.timeout(180)
@pytest.mark.parametrize("multimodal", [pytest.param(each, id=each.kind) for each in MULTIMODAL])
async def test_text_is_that_of_the_text_model(
    multimodal: Multimodal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_multimodal(multimodal, tmp_path / "models")
    expected = reference(multimodal.text.slug, tmp_path / "models" / "text")
    monkeypatch.setenv(FOLDER, str(write_stand_in(tmp_path / "imported")))
    arguments = [*ENGINE_ARGS, "--language-model-only"]
    (tmp_path / "cell").mkdir()
    with bare_cell(
        tmp_path / "cell",
        ranks=2,
        engine_args=arguments,
        model=model,
        worker="tests.harness.vllm.text_worker",
    ) as cell:
        for layout in ("dp2", "tp2", "sp2"):
            await asyncio.to_thread(cell.switch, layout)
            streams, scores = await answers(cell, layout, expected.prompts, expected.text)
            expected.check(streams, scores, FP32_TOLERANCE, f"{multimodal.name}, {layout}")
