"""Records `make demo` as a cast (asciinema's format, version 2) and draws it as an animated SVG.

    python -m tests.demo.cast record docs/demo.cast      runs the demo, which takes a minute
    python -m tests.demo.cast draw docs/demo.cast docs/demo.svg

The demo writes lines and no control sequences where its output is no terminal, so an event of the
cast is one line. Long waits are shortened in the picture, and its first line says so.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLUMNS, ROWS = 110, 30
COMMAND = "make demo"
WAIT_MAX_S = 1.2
"""The longest pause between two lines in the picture."""
END_S = 8.0
"""How long the last screen stays."""
CHAR_PX, LINE_PX, PAD_PX = 7.8, 18, 16
TIME_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Line:
    """A line of output, and the seconds after the start at which it came."""

    at_s: float
    text: str


def record(command: list[str]) -> list[Line]:
    """Run a command and return its lines; raises `CalledProcessError` if it fails."""
    started, lines = time.monotonic(), []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": str(COLUMNS)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            at_s = round(time.monotonic() - started, TIME_DIGITS)
            lines.append(Line(at_s, text.rstrip("\n")))
    if process.returncode:
        raise subprocess.CalledProcessError(
            process.returncode, command, "\n".join(line.text for line in lines)
        )
    return lines


def as_cast(lines: Iterable[Line], timestamp: int) -> str:
    """Return the cast; its first event is the command that a user types."""
    header = {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "timestamp": timestamp,
        "title": COMMAND,
        "env": {"SHELL": "/bin/sh", "TERM": "xterm-256color"},
    }
    events = [
        [0.0, "o", f"$ {COMMAND}\r\n"],
        *([line.at_s, "o", f"{line.text}\r\n"] for line in lines),
    ]
    return "\n".join(map(json.dumps, [header, *events])) + "\n"


def read_cast(text: str) -> list[Line]:
    """Return the lines of a cast; raises ValueError for another version or kind of event."""
    header, *events = map(json.loads, text.splitlines())
    if header.get("version") != 2:
        raise ValueError("the cast is not of version 2: record it with `record`.")
    if any(kind != "o" for _, kind, _ in events):
        raise ValueError("the cast has events that are no output: record it with `record`.")
    return [Line(at_s, output.rstrip("\r\n")) for at_s, _, output in events]


def wrapped(lines: Iterable[Line]) -> list[Line]:
    """Return the lines as rows of the screen; rows of one line have its time."""
    return [
        Line(line.at_s, line.text[start : start + COLUMNS])
        for line in lines
        for start in range(0, max(1, len(line.text)), COLUMNS)
    ]


def shortened(lines: list[Line]) -> list[Line]:
    """Return the lines with no pause longer than `WAIT_MAX_S`."""
    result, at_s, before_s = [], 0.0, 0.0
    for line in lines:
        at_s += min(WAIT_MAX_S, line.at_s - before_s)
        before_s = line.at_s
        result.append(Line(round(at_s, TIME_DIGITS), line.text))
    return result


def as_svg(lines: list[Line]) -> str:
    """Return the picture: rows appear at their times, and scroll when the screen is full.

    A viewer that prefers less motion sees the last screen at once.
    """
    rows = shortened(wrapped(lines))
    whole_s = rows[-1].at_s + END_S
    width, height = COLUMNS * CHAR_PX + 2 * PAD_PX, ROWS * LINE_PX + 2 * PAD_PX
    over = max(0, len(rows) - ROWS)
    steps = {row.at_s: max(0, number + 1 - ROWS) for number, row in enumerate(rows)}
    frames = "".join(
        f"{100 * at_s / whole_s:.2f}%{{transform:translateY({-LINE_PX * count}px)}}"
        for at_s, count in steps.items()
    )
    shown = "".join(
        f'<text class="row" y="{PAD_PX + LINE_PX * (number + 0.75):g}" x="{PAD_PX}" '
        f'style="animation-delay:{row.at_s:g}s">{escape(row.text)}</text>'
        for number, row in enumerate(rows)
    )
    label = escape(f"{COMMAND}: {rows[-1].text}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{label}"><title>{label}</title><style>'
        "text{font:13px ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',monospace;"
        "fill:#e7ebf0;white-space:pre}"
        ".row{visibility:hidden;animation:show 0s forwards}"
        "@keyframes show{to{visibility:visible}}"
        f"@keyframes scroll{{{frames}}}"
        f"#rows{{transform:translateY({-LINE_PX * over}px);"
        f"animation:scroll {whole_s:g}s step-end 1}}"
        "@media(prefers-reduced-motion:reduce){.row{animation:none;visibility:visible}"
        "#rows{animation:none}}"
        f'</style><rect width="100%" height="100%" rx="8" fill="#0f1318"/>'
        f'<svg x="0" y="{PAD_PX}" width="{width:g}" height="{ROWS * LINE_PX}" '
        f'viewBox="0 {PAD_PX} {width:g} {ROWS * LINE_PX}"><g id="rows">{shown}</g></svg></svg>\n'
    )


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="name", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("cast", type=Path)
    drawer = commands.add_parser("draw")
    drawer.add_argument("cast", type=Path)
    drawer.add_argument("svg", type=Path)
    options = parser.parse_args()
    if options.name == "record":
        lines = record([sys.executable, "-m", "tests.demo.run_demo", "--device", "cpu"])
        options.cast.write_text(as_cast(lines, int(time.time())))
    else:
        options.svg.write_text(as_svg(read_cast(options.cast.read_text())))


if __name__ == "__main__":
    main()
