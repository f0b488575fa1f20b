"""Plain aligned tables for a terminal or a pipe."""

from collections.abc import Iterable, Sequence


def format_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return `rows` under `headers`, numbers right-aligned, two blanks between columns."""
    cells = [[str(value) for value in row] for row in rows]
    widths = [
        max(len(header), *(len(row[column]) for row in cells)) if cells else len(header)
        for column, header in enumerate(headers)
    ]
    columns = range(len(headers))
    right = [bool(cells) and all(_is_number(row[column]) for row in cells) for column in columns]
    lines = [list(headers), *cells]
    return "\n".join(
        "  ".join(
            text.rjust(widths[column]) if right[column] else text.ljust(widths[column])
            for column, text in enumerate(line)
        ).rstrip()
        for line in lines
    )


def _is_number(text: str) -> bool:
    plain = text.replace(",", "").replace(".", "", 1).replace("-", "", 1)
    return text in ("", "-") or plain.isdigit()
