"""The comparison with another vLLM: it finds the installed one whole, and each kind of loss."""

import sys
from pathlib import Path

import pytest

from tests.harness.vllm import next_version
from tests.harness.vllm.next_version import BEGIN, END, ROOT, installed, option_names, report
from tests.harness.vllm.version_reach import adapters, reaches
from tests.harness.vllm.vllm_sources import Sources

BASE = """
class Base:
    kind = "base"

    def __init__(self, size, *, name="x"):
        self.size = size

    def step(self, tokens, budget=0):
        return self.size
"""
ENGINE = """
from dataclasses import dataclass
from vllm.base import Base

@dataclass
class Options:
    length: int
    share: float = 0.9

def run(model, *, seed=0):
    return model

class Engine(Base):
    def pause(self, keep):
        self.is_paused = keep
"""
ADAPTER = """
import vllm.engine
from vllm.engine import Engine, Options, run

class Own(Engine):
    def step(self, tokens, budget=0):
        return self.size + tokens

def serve(engine):
    engine.pause(True)
    run("m", seed=1)
    vllm.engine.Engine(4, name="n")
    return Options(length=3), Engine.kind, engine.is_paused
"""


def tree(folder: Path, **changed: str) -> Sources:
    """A package `vllm` of two modules; a change is written as `old -> new`."""
    package = folder / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in (("base", BASE), ("engine", ENGINE)):
        old, _, new = changed.get(name, "").partition(" -> ")
        assert old in text
        (package / f"{name}.py").write_text(text.replace(old, new) if old else text)
    return Sources(folder)


@pytest.fixture
def product(tmp_path: Path) -> Path:
    folder = tmp_path / "product" / "worker"
    folder.mkdir(parents=True)
    (folder / "adapter.py").write_text(ADAPTER)
    return folder.parent


def lost(tmp_path: Path, product: Path, **changed: str) -> list[tuple[str, str]]:
    found = list(adapters(product))
    missing, _ = report(found, tree(tmp_path / "old"), tree(tmp_path / "new", **changed))
    return [(each.kind, each.fault) for each in missing]


def test_the_installed_version_has_all_that_the_product_reaches() -> None:
    """So a fault of another version is a loss, and not a gap of the comparison."""
    checked = reaches(list(adapters(ROOT)), installed())
    assert [each for each in checked if each.fault] == []
    kinds = {each.kind for each in checked}
    assert kinds == {"import", "member", "call", "override", "inherited"}
    assert len(checked) > 500


def test_equal_versions_lose_nothing(tmp_path: Path, product: Path) -> None:
    assert lost(tmp_path, product) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"engine": "class Options -> class Settings"}, [("import", "no such name")]),
        (
            {"engine": "def run(model, *, seed=0) -> def run(model)"},
            [("call", "no parameter seed")],
        ),
        ({"engine": "share: float = 0.9 -> share: float"}, [("call", "share is missing")]),
        ({"base": 'name="x" -> label="x"'}, [("call", "no parameter name")]),
        (
            {"base": "def step(self, tokens, budget=0) -> def step(self, tokens, budget, epoch)"},
            [("override", "the override lacks epoch")],
        ),
        ({"engine": "def pause(self, keep) -> def pause(self)"}, [("attribute", "at most 0")]),
    ],
    ids=["name", "parameter", "field", "constructor", "override", "untyped call"],
)
def test_each_kind_of_loss(
    tmp_path: Path, product: Path, changed: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    found = lost(tmp_path, product, **changed)
    assert len(found) == len(expected)
    for (kind, fault), (wanted, words) in zip(found, expected, strict=True):
        assert kind == wanted
        assert words in fault


def test_other_parameters_of_methods_are_shown(tmp_path: Path, product: Path) -> None:
    """A method that the product overrides or calls may have a new parameter and fit still."""
    new = tree(tmp_path / "new", base="budget=0): -> budget=0, epoch=0):".replace("):", ""))
    _, lines = report(list(adapters(product)), tree(tmp_path / "old"), new)
    (row,) = [line for line in lines if "`Engine.step`" in line]
    assert "`worker/adapter.py` | `(tokens, budget=)` | `(tokens, budget=, epoch=)`" in row


def test_members_and_attributes(tmp_path: Path, product: Path) -> None:
    found = lost(tmp_path, product, base='kind = "base" -> sort = "base"')
    assert ("member", "no such member") in found
    found = lost(tmp_path / "2", product, base="self.size = size -> self.length = size")
    assert ("inherited", "no such member") in found
    found = lost(tmp_path / "3", product, engine="self.is_paused = keep -> self.waits = keep")
    assert found == [("attribute", "nothing has this name")]


def test_a_name_with_two_places_needs_one(tmp_path: Path, product: Path) -> None:
    caught = (
        "try:\n    from vllm.gone import run as run_now\nexcept ModuleNotFoundError:\n"
        "    from vllm.engine import run as run_now\nrun_now('m')\n"
    )
    (product / "worker" / "adapter.py").write_text(caught)
    assert lost(tmp_path, product) == []
    assert lost(tmp_path / "2", product, engine="def run(model, -> def start(model,") != []


def test_the_options_of_the_command_line() -> None:
    names = option_names(installed())
    assert {"--max-model-len", "--gpu-memory-utilization", "--tool-call-parser"} <= names


def test_the_report_is_written_between_the_marks(
    tmp_path: Path, product: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(next_version, "ROOT", product)
    monkeypatch.setattr(next_version, "installed", lambda: tree(tmp_path / "old"))
    tree(tmp_path / "new", engine="class Options -> class Settings")
    words = [str(tmp_path / "new"), "--write", str(page)]
    monkeypatch.setattr(sys, "argv", ["next_version", *words])
    assert next_version.main() == 1
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "| `worker/adapter.py` | `vllm.engine.Options` | no such name |" in text
