"""How the log line of a request is known before it is parsed. Pure, and quick to import."""

EVENT = "request"
JSON_START = f'{{"event":"{EVENT}"'
CONSOLE_WORDS = f"[{EVENT}]"
CONSOLE_CHARS_MAX = 64
"""A line for people has these words within its first characters."""


def is_request_line(line: str) -> bool:
    """Return whether a line of a gateway's log is that of a request, in either format."""
    return line.startswith(JSON_START) or CONSOLE_WORDS in line[:CONSOLE_CHARS_MAX]
