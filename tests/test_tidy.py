"""Rules about the source text itself: sizes, names, imports of the engine, what may be said."""

import ast
import os
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "coordinator", "worker", "comm_pool", "kvadaptor", "loadgen")
DISTRIBUTION = "aileron"

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400
TEXT_BYTES_MAX = 1024 * 1024
"""Larger files are data."""
BANNED_NAMES = frozenset({"utils.py", "util.py", "helpers.py", "common.py", "misc.py"})
SHADOWING_NAMES = frozenset({"types.py", "queue.py", "select.py", "signal.py", "logging.py"})
ENGINE_PACKAGES = frozenset({"vllm"})
ENGINE_PREFIX = "vllm_"
# Put together here, so that this file does not hold them itself.
BANNED_TEXTS = ("/" + "work" + "/", ".." + "/shared", "/" + "opt/wheels", "/" + "root/")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


PRODUCT = python_files(*PACKAGES)
EVERYTHING = [*PRODUCT, *python_files("tests")]


def text_files() -> Iterator[Path]:
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            each
            for each in subfolders
            if each == ".ci" or not (each.startswith(".") or each == "__pycache__")
        ]
        for name in names:
            path = Path(folder, name)
            if path.stat().st_size <= TEXT_BYTES_MAX:
                yield path


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_file_is_short_and_so_are_its_functions(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= FILE_LINES_MAX
    long = [
        f"{node.name} ({node.end_lineno - node.lineno + 1} lines)"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert not long, f"longer than {FUNCTION_LINES_MAX} lines: {', '.join(long)}"


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_file_has_a_telling_name(path: Path) -> None:
    assert path.name not in BANNED_NAMES
    assert path.name not in SHADOWING_NAMES
    assert "manager" not in path.name


def imported_packages(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_only_adapters_touch_vllm(path: Path) -> None:
    """One adapter module per seam, each with the engine in its name."""
    if not path.name.startswith(ENGINE_PREFIX):
        assert not imported_packages(path) & ENGINE_PACKAGES


def test_no_file_names_the_machine_it_was_written_on() -> None:
    said = [
        f"{name_of(path)}: {needle}"
        for path in text_files()
        for needle in BANNED_TEXTS
        if needle.encode() in path.read_bytes()
    ]
    assert not said


def test_asserts_are_on() -> None:
    """Broken invariants must end the process: nothing here may run under `python -O`."""
    assert __debug__


def test_no_other_distribution_provides_our_package_names() -> None:
    providers = packages_distributions()
    for package in PACKAGES:
        assert set(providers.get(package, [])) <= {DISTRIBUTION}
