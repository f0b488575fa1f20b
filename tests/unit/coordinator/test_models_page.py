"""docs/models.md and the product's list of tested models say what the tests' catalog has."""

from pathlib import Path

from coordinator.protocol.tested_models import TESTED_ARCHITECTURES
from tests.harness.vllm.families import REFUSED, SERVED
from tests.harness.vllm.models_page import PAGE, architecture_of, page
from tests.harness.vllm.multimodal_models import MULTIMODAL
from tests.harness.vllm.weight_forms import FORMS


def test_the_page_is_of_the_catalog() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.harness.vllm.models_page`"


def test_the_tests_of_each_form_exist() -> None:
    tests = Path(__file__).resolve().parents[2]
    named = {name for form in FORMS for name in (form.cpu_test, form.gpu_test)}
    assert not [name for name in named if not (tests / name).exists()]


def test_the_product_lists_what_is_tested() -> None:
    texts = {multimodal.architecture for multimodal in MULTIMODAL}
    assert {architecture_of(family) for family in SERVED} | texts == TESTED_ARCHITECTURES
    assert not {architecture_of(family) for family in REFUSED} & TESTED_ARCHITECTURES


def test_no_other_file_of_the_product_names_an_architecture() -> None:
    """What is served follows from the layers."""
    root = Path(__file__).resolve().parents[3]
    folders = ("coordinator", "worker", "comm_pool", "kvadaptor", "gateway")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    found = [path.name for path in files if "ForCausalLM" in path.read_text()]
    assert found == ["tested_models.py"]
