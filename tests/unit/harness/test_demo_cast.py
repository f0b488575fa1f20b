"""The cast of `make demo` in the README: the form of its output, its picture, and its recorder."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from tests.demo.cast import (
    COLUMNS,
    COMMAND,
    END_S,
    ROWS,
    WAIT_MAX_S,
    Line,
    as_cast,
    as_svg,
    read_cast,
    record,
    shortened,
    wrapped,
)
from tests.demo.run_demo import STREAMS, TOKENS_PER_STREAM

DOCS = Path(__file__).parents[3] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def test_the_cast_has_what_the_demo_prints() -> None:
    """Progress, two switches under streams, a row for each stream, and the end of a good run."""
    lines = read_cast((DOCS / "demo.cast").read_text())
    texts = [line.text for line in lines]
    times = [line.at_s for line in lines]
    assert texts[0] == f"$ {COMMAND}"
    assert times == sorted(times)
    for word in ("starting aileron-demo in layout dp2", "rank 1: ready", "serving aileron-demo"):
        assert any(word in text for text in texts), word
    switches = [text for text in texts if text.startswith("switching to ")]
    assert [text.split()[2] for text in switches] == ["tp2", "dp2"]
    rows = [re.fullmatch(r" +(\d+) +(\d+) +\d+  yes", text) for text in texts]
    streams = {int(row[1]): int(row[2]) for row in rows if row is not None}
    assert streams == dict.fromkeys(range(STREAMS), TOKENS_PER_STREAM)
    assert sum(" served   reshard " in text for text in texts) == len(switches)
    assert "every stream was complete." in texts


def test_the_picture_is_drawn_from_the_cast() -> None:
    """Otherwise run `python -m tests.demo.cast draw docs/demo.cast docs/demo.svg`."""
    lines = read_cast((DOCS / "demo.cast").read_text())
    picture = (DOCS / "demo.svg").read_text()
    assert picture == as_svg(lines)
    root = ET.fromstring(picture)
    shown = [node.text or "" for node in root.iter(f"{SVG}text")]
    assert shown == [row.text for row in wrapped(lines)]
    assert root.get("role") == "img"
    assert root.get("aria-label", "").startswith(COMMAND)
    assert "prefers-reduced-motion" in picture


def test_long_lines_are_wrapped_and_long_waits_shortened() -> None:
    lines = [Line(0.0, "a"), Line(50.0, "b" * (COLUMNS + 3)), Line(50.5, "")]
    rows = wrapped(lines)
    assert [len(row.text) for row in rows] == [1, COLUMNS, 3, 0]
    assert [row.at_s for row in shortened(rows)] == [0.0, WAIT_MAX_S, WAIT_MAX_S, WAIT_MAX_S + 0.5]


def test_a_full_screen_scrolls() -> None:
    picture = as_svg([Line(number / 10, f"line {number} <&>") for number in range(ROWS + 5)])
    assert "line 34 &lt;&amp;&gt;" in picture
    assert f"translateY({-5 * 18}px)" in picture
    assert f"scroll {(ROWS + 4) / 10 + END_S:g}s" in picture


def test_a_recorded_command(tmp_path: Path) -> None:
    lines = record(
        [sys.executable, "-c", "import time; print('one'); time.sleep(0.2); print('two')"]
    )
    assert [line.text for line in lines] == ["one", "two"]
    assert lines[1].at_s - lines[0].at_s > 0.15
    again = read_cast(as_cast(lines, 1))
    assert again == [Line(0.0, f"$ {COMMAND}"), *lines]
    with pytest.raises(CalledProcessError):
        record([sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize(
    "text", ['{"version": 1}', '{"version": 2}\n[0.1, "i", "typed"]'], ids=["version", "input"]
)
def test_other_casts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="record it with"):
        read_cast(text)
