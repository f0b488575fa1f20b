"""Decodes a body that the client compressed, piece by piece and within a limit (RFC 9110, 8.4).

A small body may decode to gigabytes, so `Decoder.decode` returns at most `PIECE_BYTES` at a time,
and the caller stops at its own limit. Called by `intake.BodyReader`. Pure.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from gateway.errors import ApiError, api_error

ENCODING_HEADER: Final = "content-encoding"
ENCODINGS: Final = ("gzip", "deflate", "zstd")
PIECE_BYTES: Final = 256 * 1024
"""Largest decoded piece: about a millisecond of work."""
MEMBERS_MAX: Final = 64
"""Most members of a gzip body, or frames of a zstd body: each may be tiny and decode to nothing."""
ZSTD_WINDOW_LOG: Final = 23
"""Largest window of a zstd frame, 8 MiB, as RFC 8878 and RFC 9659 recommend for HTTP."""

_ZLIB_DEFLATE = 8


class BadEncodingError(Exception):
    """The body is not in the format that its Content-Encoding names."""


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class Decoder:
    """Decodes one body."""

    def __init__(self, encoding: str) -> None:
        """`encoding` is one of `ENCODINGS`."""
        self._encoding = encoding
        self._decompressor: _Decompressor | None = None
        self._error: type[Exception] = zlib.error
        self._members = 0
        self._is_padding = False
        """Whether zeros follow the last member of a gzip body, where no other may come."""

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield the decoded pieces of the next bytes; raises `BadEncodingError`."""
        while data:
            if self._decompressor is None:
                if self._is_padded(data):
                    return
                self._decompressor = self._make(data)
            yield from self._pieces(self._decompressor, data)
            if not self._decompressor.eof:
                return
            data, self._decompressor = self._decompressor.unused_data, None
            self._members += 1
            if data and (self._encoding == "deflate" or self._members > MEMBERS_MAX):
                raise BadEncodingError

    def _is_padded(self, data: bytes) -> bool:
        """Return whether all bytes are the zeros with which gzip's tools fill up a block."""
        if self._encoding != "gzip" or not self._members:
            return False
        self._is_padding = self._is_padding or data.startswith(b"\0")
        if self._is_padding and data.strip(b"\0"):
            raise BadEncodingError
        return self._is_padding

    def finish(self) -> None:
        """Check that the body is complete; raises `BadEncodingError`."""
        if self._decompressor is not None:
            raise BadEncodingError

    def _make(self, data: bytes) -> _Decompressor:
        if self._encoding == "gzip":
            return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        if self._encoding == "zstd":
            # Imported when the first client needs it: hardly any does.
            from backports import zstd

            self._error = zstd.ZstdError
            options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
            return zstd.ZstdDecompressor(options=options)
        # Some clients send the bare format where the standard wants zlib's header.
        is_bare = data[0] & 0x0F != _ZLIB_DEFLATE
        return zlib.decompressobj(wbits=-zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS)

    def _pieces(self, decompressor: _Decompressor, data: bytes) -> Iterator[bytes]:
        try:
            while True:
                piece = decompressor.decompress(data, PIECE_BYTES)
                # zlib hands unread input back; zstd keeps it.
                data = getattr(decompressor, "unconsumed_tail", b"")
                if piece:
                    yield piece
                if decompressor.eof or (len(piece) < PIECE_BYTES and not data):
                    return
        except self._error as error:
            raise BadEncodingError from error


def find_decoder(headers: Mapping[str, str]) -> Decoder | ApiError | None:
    """Return the decoder that a body needs, None for a plain one, or the error."""
    value = headers.get(ENCODING_HEADER, "").strip().lower()
    encoding = value.removeprefix("x-")
    if encoding in ("", "identity"):
        return None
    if encoding in ENCODINGS:
        return Decoder(encoding)
    names = ", ".join(ENCODINGS)
    text = f"The Content-Encoding is not supported: send the body plain, or as one of {names}."
    error = api_error("unsupported_media_type", text, ENCODING_HEADER)
    return error.with_headers([(b"accept-encoding", names.encode())])
