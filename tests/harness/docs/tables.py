"""Tables and texts of generated pages, as Markdown."""

from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """A text as one cell: on one line, and without a bar that would end it."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, with a line break after its last row."""
    lines = [head, ["---"] * len(head), *([cell(each) for each in row] for row in rows)]
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines)
        .replace("| --- ", "|---")
        .replace("|---| ---", "|---|---")
    )


def sentence(text: str) -> str:
    """A text that begins with a capital letter and ends with a full stop."""
    text = " ".join(text.split())
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
