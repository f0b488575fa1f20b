"""Streams an uploaded file from the client to the disk, never whole in memory.

Reads a multipart form with `python_multipart`'s push parser; the fields may come in any order. Used
by the API.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.batches.content import Content, Part
from gateway.batches.terms import FILE_BYTES_MAX, FILENAME_CHARS_MAX
from gateway.errors import ApiError, api_error
from gateway.http.intake import BodyReader

FORM_BYTES_MAX = FILE_BYTES_MAX + 64 * 1024
"""Largest body of an upload: a file, and the form around it."""
UPLOAD_WAIT_S = 1_800.0
"""Longest duration of an upload."""
WRITE_BYTES = 512 * 1024
"""Bytes collected for one write."""
FIELD_BYTES_MAX = 1_024
HEADER_BYTES_MAX = 4 * 1024
"""Most bytes of the headers of one field."""
FIELDS_MAX = 16

FILE_FIELD: Final = "file"


class BadFormError(Exception):
    """The form cannot be read; the message is the reason."""


@dataclass(slots=True)
class Upload:
    """A finished upload; its owner must keep or drop `part`."""

    part: Part
    filename: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    has_file: bool = False


class _Form:
    """Collects the parser's events; file bytes wait in `waiting` until they are written."""

    def __init__(self, boundary: bytes) -> None:
        self.waiting = bytearray()
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_complete = False
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._header_bytes = 0
        self._name = ""
        self._value = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._part_ends,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Take a piece of the body; raises `BadFormError`."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadFormError("The body is not valid multipart/form-data.") from error

    def _part_begins(self) -> None:
        self._disposition, self._header_bytes, self._name = b"", 0, ""
        self._value = bytearray()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._take_header(0, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._take_header(1, data[start:end])

    def _take_header(self, which: int, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > HEADER_BYTES_MAX:
            raise BadFormError(
                f"The headers of a form field may have {HEADER_BYTES_MAX} bytes at most."
            )
        self._header[which].extend(data)

    def _header_ends(self) -> None:
        if bytes(self._header[0]).lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])
        self._header = (bytearray(), bytearray())

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == FILE_FIELD:
            if self.filename is not None:
                raise BadFormError("Upload one file at a time.")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        elif len(self.fields) >= FIELDS_MAX:
            raise BadFormError(f"The form may have {FIELDS_MAX} fields at most.")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE_FIELD:
            self.waiting += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > FIELD_BYTES_MAX:
            raise BadFormError(f"A form field may have {FIELD_BYTES_MAX} bytes at most.")

    def _part_ends(self) -> None:
        if self._name != FILE_FIELD:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_complete = True


async def receive_file(
    reader: BodyReader, content_type: str, content: Content
) -> Upload | ApiError:
    """Write an upload into the folder; raises `ClientGoneError` and `StorageError`."""
    if (error := reader.check_head()) is not None:
        return error
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 200:
        text = "Upload files as multipart/form-data with a boundary."
        return api_error("unsupported_media_type", text)
    form = _Form(boundary)
    part = await asyncio.to_thread(content.begin)
    try:
        error = await _fill(reader, form, part)
    except BaseException:
        part.drop()
        raise
    if error is not None:
        part.drop()
        return error
    filename = (form.filename or "")[:FILENAME_CHARS_MAX]
    return Upload(part, filename, form.fields, form.filename is not None)


async def _fill(reader: BodyReader, form: _Form, part: Part) -> ApiError | None:
    while not reader.is_complete:
        piece = await reader.read()
        if isinstance(piece, ApiError):
            return piece
        try:
            form.feed(piece)
        except BadFormError as error:
            return api_error("invalid_value", str(error))
        if len(form.waiting) >= WRITE_BYTES or reader.is_complete:
            data = bytes(form.waiting)
            form.waiting.clear()
            if part.bytes + len(data) > FILE_BYTES_MAX:
                text = f"A file may have {FILE_BYTES_MAX} bytes at most: upload it in parts."
                return api_error("request_too_large", text)
            await asyncio.to_thread(part.write, data)
    return (
        None
        if form.is_complete
        else api_error("invalid_value", "The form is incomplete: send it up to its last boundary.")
    )
