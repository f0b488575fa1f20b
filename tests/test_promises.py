"""Tests that docs/promises.md names exist; each row names one or says none; no ADR is left out."""

import re
from pathlib import Path

from tests.harness.runs.definitions import names_in

TESTS = Path(__file__).resolve().parent
DOCS = TESTS.parent / "docs"
HEAD = ["promise", "source", "tests"]
NONE = "none"
TEST = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")
MARKS = r"(?: \((?:long|chaos|GPU|GPU, chaos|fleet|soak)\))?"
CELL = re.compile(rf"{TEST.pattern}{MARKS}(?:, {TEST.pattern}{MARKS})*")
ROWS_MIN = 300
"""A page that cannot be read any more shows as one with few rows."""


def rows() -> list[list[str]]:
    """The cells of every row."""
    lines = (DOCS / "promises.md").read_text().splitlines()
    found = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    stripped = [[cell.strip() for cell in cells] for cells in found]
    return [cells for cells in stripped if cells != HEAD and set("".join(cells)) != {"-"}]


ROWS = rows()
NAMED = sorted({match.groups() for cells in ROWS for match in TEST.finditer(cells[-1])}, key=str)


def test_what_is_named_exists() -> None:
    missing = [
        path if name is None else f"{path}::{name}"
        for path, name in NAMED
        if not (TESTS / path).is_file() or name not in {None, *names_in(TESTS / path)}
    ]
    assert not missing, "docs/promises.md names what is not in tests/"


def test_each_row_names_a_test_or_says_none() -> None:
    assert len(ROWS) >= ROWS_MIN
    odd = [cells for cells in ROWS if len(cells) != len(HEAD) or not all(cells)]
    assert not odd, "each row has a promise, its source and its tests"
    odd = [cells for cells in ROWS if cells[-1] != NONE and not CELL.fullmatch(cells[-1])]
    assert not odd, f"tests are `path.py` or `path.py::name` with their mark, or {NONE}"


def test_each_promise_is_there_once() -> None:
    told = [(promise, source) for promise, source, _ in ROWS]
    assert len(told) == len(set(told))


def test_each_decision_is_there() -> None:
    decisions = {path.name[:4] for path in (DOCS / "adr").glob("[0-9]*.md")}
    assert decisions
    sources = " ".join(source for _, source, _ in ROWS)
    assert decisions == set(re.findall(r"\bADR (\d{4})\b", sources))
