"""Replays of real requests: traces of BurstGPT and of Azure's LLM inference, from a CSV file.

Reads only the time and the tokens of prompt and answer. Columns are found by name, in any order, of
BurstGPT (arXiv 2401.17644) or of Azure 2023 and 2024 (AzurePublicDataset); see `FORMATS`. Rows must
be in order of time: real traces exceed memory, so reading stops after the wanted window. Rows
without tokens (BurstGPT's failed requests) are skipped and counted; any other fault in a row raises
a `UsageError` that names it.
"""

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from loadgen.errors import UsageError
from loadgen.workload.arrivals import MAX_PLANNED_REQUESTS
from loadgen.workload.lengths import MAX_LENGTH_TOKENS

MAX_LINE_CHARS = 4096
MIN_WINDOW_S = 1.0
EXCERPT_CHARS_MAX = 40


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; `at_s` is seconds after the window's start."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows of a window `duration_s` long, and how many rows it skipped without tokens."""

    columns: str
    rows: tuple[TraceRow, ...]
    duration_s: float
    skipped_rows: int


@dataclass(frozen=True, slots=True)
class Window:
    """The wanted part of a trace, in the trace's seconds after its first row; None is its end."""

    start_s: float
    length_s: float | None


@dataclass(frozen=True, slots=True)
class _Columns:
    """A trace format's column names and its form of time."""

    name: str
    time: str
    prompt: str
    output: str
    seconds: Callable[[str], float]


def sped_up(trace: Trace, rate_scale: float) -> Trace:
    """Return the same requests, arriving `rate_scale` times as fast."""
    rows = tuple(replace(row, at_s=row.at_s / rate_scale) for row in trace.rows)
    return replace(trace, rows=rows, duration_s=trace.duration_s / rate_scale)


def read_trace(path: Path, window: Window) -> Trace:
    """Read the rows of one window; raises `UsageError` for a faulty file."""
    try:
        # A byte order mark is not part of the first column's name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            return parse_trace(str(path), _short_lines(str(path), file.readline), window)
    except OSError as error:
        raise UsageError(f"--trace {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--trace {path} is not text in UTF-8.") from error


def parse_trace(name: str, lines: Iterable[str], window: Window) -> Trace:
    """Read a trace from its lines; errors call it `name`."""
    # Strict, so that an unclosed quote is an error and does not swallow the rows after it.
    reader = csv.reader(lines, strict=True)
    try:
        header = [cell.strip() for cell in next(reader, [])]
        columns = _columns_of(name, header)
        timed = _timed_rows(name, reader, header, columns)
        return _taken(name, columns, timed, window)
    except csv.Error as error:
        raise UsageError(
            f"Line {reader.line_num} of --trace {name} is not CSV: {error}."
        ) from error


def _taken(
    name: str, columns: _Columns, timed: Iterable[tuple[float, int, int]], window: Window
) -> Trace:
    rows: list[TraceRow] = []
    skipped_rows, last_s = 0, 0.0
    end_s = math.inf if window.length_s is None else window.start_s + window.length_s
    for at_s, prompt_tokens, output_tokens in timed:
        if at_s >= end_s:
            break
        if at_s < window.start_s:
            continue
        last_s = at_s - window.start_s
        if not prompt_tokens or not output_tokens:
            skipped_rows += 1
            continue
        rows.append(TraceRow(last_s, prompt_tokens, output_tokens))
        if len(rows) > MAX_PLANNED_REQUESTS:
            raise UsageError(
                f"--trace {name} has more than {MAX_PLANNED_REQUESTS} requests in the wanted time; "
                "take less of it with --duration."
            )
    if not rows:
        raise UsageError(f"--trace {name} has no request with tokens in the wanted time.")
    # The last request needs a phase to lie in, so the window ends a little after it.
    length_s = max(MIN_WINDOW_S, math.nextafter(last_s, math.inf))
    return Trace(columns.name, tuple(rows), window.length_s or length_s, skipped_rows)


def _timed_rows(
    name: str, reader: Iterator[list[str]], header: list[str], columns: _Columns
) -> Iterator[tuple[float, int, int]]:
    """Yield each row's seconds after the first row, prompt tokens and output tokens, checked."""
    first_s, before_s = None, -math.inf
    for number, cells in enumerate(reader, start=2):
        if not any(cell.strip() for cell in cells):
            continue
        where = f"Row {number} of --trace {name}"
        if len(cells) != len(header):
            raise UsageError(f"{where} has {len(cells)} cells and the header {len(header)}.")
        row = dict(zip(header, cells, strict=True))
        now_s = _seconds(where, columns, row)
        if now_s < before_s:
            raise UsageError(f"{where} is earlier than the row before it; sort the file by time.")
        before_s = now_s
        first_s = now_s if first_s is None else first_s
        yield (
            now_s - first_s,
            _tokens(where, columns.prompt, row),
            _tokens(where, columns.output, row),
        )


def _seconds(where: str, columns: _Columns, row: Mapping[str, str]) -> float:
    text = row[columns.time].strip()
    try:
        seconds = columns.seconds(text)
    except (ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise UsageError(f"{where} has {columns.time} '{_excerpt(text)}', which is not a time.")
    return seconds


def _tokens(where: str, column: str, row: Mapping[str, str]) -> int:
    text = row[column].strip()
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) > MAX_LENGTH_TOKENS:
        raise UsageError(
            f"{where} has {column} '{_excerpt(text)}', which is not a whole number from 0 to "
            f"{MAX_LENGTH_TOKENS}."
        )
    return int(text)


def _epoch_s(text: str) -> float:
    """Return a date and time as seconds; without a time zone it counts as UTC."""
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


FORMATS = (
    _Columns("BurstGPT", "Timestamp", "Request tokens", "Response tokens", float),
    _Columns("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _epoch_s),
)


def _columns_of(name: str, header: list[str]) -> _Columns:
    if not any(header):
        raise UsageError(f"--trace {name} is empty; it needs a header and rows.")
    for columns in FORMATS:
        wanted = (columns.time, columns.prompt, columns.output)
        if all(header.count(column) == 1 for column in wanted):
            return columns
    known = " or ".join(f"{each.time}, {each.prompt}, {each.output}" for each in FORMATS)
    raise UsageError(
        f"--trace {name} has the columns '{_excerpt(', '.join(header))}'; it needs {known}, "
        "each once."
    )


def _short_lines(name: str, readline: Callable[[int], str]) -> Iterator[str]:
    """Yield lines of a file; refuse one that is too long before it fills the memory."""
    number = 0
    while line := readline(MAX_LINE_CHARS + 1):
        number += 1
        if len(line) > MAX_LINE_CHARS:
            raise UsageError(
                f"Line {number} of --trace {name} is longer than {MAX_LINE_CHARS} characters."
            )
        yield line


def _excerpt(text: str) -> str:
    """Return external text, short and on one line."""
    plain = "".join(char if char.isprintable() else "?" for char in text)
    return plain if len(plain) <= EXCERPT_CHARS_MAX else f"{plain[:EXCERPT_CHARS_MAX]}…"
