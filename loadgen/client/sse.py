"""A server-sent-events parser that never touches a socket: bytes in, event data out.

Follows the WHATWG rules for the features that an OpenAI stream uses: LF, CR and CRLF line ends,
several `data:` lines per event, comments, an optional BOM. The result does not depend on how the
bytes were cut into chunks. An event that EOF cuts before its blank line is dropped, as clients do.
"""

MAX_EVENT_BYTES = 4 * 1024 * 1024
BOM = b"\xef\xbb\xbf"


class SseOverflowError(Exception):
    """The server sent an event or a line of more than `MAX_EVENT_BYTES`."""


class SseParser:
    """Takes chunks and returns the data of every event that they complete."""

    def __init__(self) -> None:
        self.comments = 0
        self._partial_line = b""
        self._data_lines: list[bytes] = []
        self._data_bytes = 0
        self._skip_lf = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[str]:
        """Take the next bytes and return the data of the events that are now complete."""
        text = self._partial_line + self._normal_line_ends(chunk)
        if self._at_start:
            if len(text) < len(BOM) and BOM.startswith(text):
                self._partial_line = text
                return []
            text = text.removeprefix(BOM)
            self._at_start = False
        *lines, self._partial_line = text.split(b"\n")
        self._check_size(len(self._partial_line))
        return [event for line in lines if (event := self._take_line(line)) is not None]

    def _normal_line_ends(self, chunk: bytes) -> bytes:
        """Turn CR and CRLF into LF; a CRLF cut in two must not become two line ends."""
        if self._skip_lf and chunk:
            self._skip_lf = False
            chunk = chunk.removeprefix(b"\n")
        if b"\r" not in chunk:
            return chunk
        self._skip_lf = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _take_line(self, line: bytes) -> str | None:
        """Take one whole line; a blank one ends the event and returns its data, if it has any."""
        if not line:
            return self._end_event()
        if line.startswith(b":"):
            self.comments += 1
            return None
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data_lines.append(value.removeprefix(b" "))
            self._data_bytes += len(value)
            self._check_size(self._data_bytes)
        return None

    def _end_event(self) -> str | None:
        if not self._data_lines:
            return None
        data = b"\n".join(self._data_lines).decode("utf-8", errors="replace")
        self._data_lines, self._data_bytes = [], 0
        return data

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > MAX_EVENT_BYTES:
            raise SseOverflowError(f"an SSE event of more than {MAX_EVENT_BYTES} bytes")
