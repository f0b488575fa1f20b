"""All that a client may ask for, in every mode, with the answers that `dp` gives."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.harness.cells.features import FEATURES, MODES
from tests.harness.cells.product import MODEL_NAME, Product, product
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.ranks]

ENGINE = ["--dtype", "float32", "--max-model-len", "1024"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Two ranks in fp32, so that tokens must be identical."""
    folder = tmp_path_factory.mktemp("features")
    # Two stages divide its layers.
    model = model_of("four-layers", folder)
    settings = {
        "model": {"path": str(model), "served_name": MODEL_NAME, "engine_args": ENGINE},
        "cell": {"pipelines": ["pp2"]},
        "batches": {"lines_at_once": 4},
    }
    with product(folder, ranks=2, settings=settings) as up:
        yield up


@pytest.fixture(scope="module")
def client(running: Product) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(running: Product, client: openai.OpenAI) -> dict[str, Any]:
    """What `dp` answers."""
    running.switch(MODES["dp"], "recompute")
    return {name: feature(client) for name, feature in FEATURES.items()}


@pytest.mark.parametrize("mode", MODES)
def test_every_feature_gives_the_same_in_every_mode(
    running: Product, client: openai.OpenAI, wanted: dict[str, Any], mode: str
) -> None:
    running.switch(MODES[mode], "recompute")
    found = {name: feature(client) for name, feature in FEATURES.items()}
    assert found == wanted
