"""Generated pages are those of the code, and hand-made pages say what the code says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from coordinator.protocol.config import Config, ModelConfig, load_config
from tests.harness.cells.servers import ROOT
from tests.harness.docs.api_page import ANSWER_HEADERS, REQUEST_HEADERS
from tests.harness.docs.configuration_page import EXAMPLE_MODEL, Section, rows, sections
from tests.harness.docs.pages import DOCS, PAGES
from tests.harness.vllm.families import SERVED

PRODUCT = ("comm_pool", "coordinator", "gateway", "kvadaptor", "worker")
MESSAGES_MIN = 35
HEADERS_OF_LIBRARIES = {"traceparent", "x-ratelimit-limit-requests"}
"""Read by OpenTelemetry; and put together from its parts."""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_it_is_fresh(path: Path) -> None:
    assert path.read_text() == PAGES[path](), "run `python -m tests.harness.docs`"


def test_the_example_has_every_key_and_its_default() -> None:
    example = DOCS / "aileron.yaml"
    assert load_config(example) == Config(model=ModelConfig(path=EXAMPLE_MODEL))
    written = yaml.safe_load(example.read_text())
    assert written == Config(model=ModelConfig(path=EXAMPLE_MODEL)).model_dump(mode="json")


def test_every_key_has_a_text() -> None:
    without = [
        ".".join((*section.path, key.strip("`")))
        for section in sections(Section((), Config))
        for key, _, _, text in rows(section)
        if not text
    ]
    assert not without, "write a docstring under the field"
    assert not [each.path for each in sections(Section((), Config)) if not each.model.__doc__]


def test_readme_counts_the_tested_families() -> None:
    assert f"{len(SERVED)} [tested families](docs/models.md)" in (ROOT / "README.md").read_text()


def texts_of(node: ast.AST) -> Iterator[str]:
    """The texts in a file; a gap of an f-string is an ellipsis, as pages write it."""
    for child in ast.walk(node):
        if isinstance(child, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "…" for p in child.values]
            yield "".join(map(str, parts))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


@pytest.fixture(scope="module")
def product_texts() -> str:
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    files.append(ROOT / "tools" / "bootstrap.py")
    return "\n".join(text for path in files for text in texts_of(ast.parse(path.read_text())))


def test_messages_of_the_troubleshooting_page_exist(product_texts: str) -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) >= MESSAGES_MIN
    assert not [message for message in messages if message not in product_texts]


def test_headers_of_the_api_page_exist(product_texts: str) -> None:
    pieces = [
        node.value.decode()
        for path in (ROOT / "gateway").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, bytes) and node.value.isascii()
    ]
    known = {*pieces, *product_texts.split("\n")}
    named = {name.lower() for name in (*REQUEST_HEADERS, *ANSWER_HEADERS)}
    assert named - known == HEADERS_OF_LIBRARIES & (named - known)
