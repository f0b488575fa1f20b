"""Bodies that a client has compressed."""

import gzip
import random
import zlib
from collections.abc import Callable

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.http.content_encoding import (
    ENCODINGS,
    MEMBERS_MAX,
    PIECE_BYTES,
    BadEncodingError,
    Decoder,
    find_decoder,
)


def deflate_bare(data: bytes) -> bytes:
    """Without zlib's header, as some clients send it."""
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


ENCODERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", deflate_bare),
    ("zstd", zstd.compress),
]


def decode(encoding: str, pieces: list[bytes]) -> list[bytes]:
    decoder = Decoder(encoding)
    decoded = [piece for each in pieces for piece in decoder.decode(each)]
    decoder.finish()
    return decoded


@settings(deadline=None, max_examples=60)
@given(
    data=st.binary(max_size=2_000),
    repeat=st.sampled_from([1, 1_000]),
    size=st.integers(1, 5_000),
    which=st.sampled_from(ENCODERS),
    members=st.integers(1, 3),
)
def test_what_is_encoded_is_decoded(
    data: bytes,
    repeat: int,
    size: int,
    which: tuple[str, Callable[[bytes], bytes]],
    members: int,
) -> None:
    encoding, encode = which
    members = 1 if encoding == "deflate" else members
    whole = encode(data * repeat) * members
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    decoded = decode(encoding, pieces)
    assert b"".join(decoded) == data * repeat * members
    assert all(0 < len(piece) <= PIECE_BYTES for piece in decoded)


@pytest.mark.parametrize("size", [1, 7, 1_000])
@pytest.mark.parametrize("members", [1, 2])
def test_zeros_may_fill_up_a_gzip_body(size: int, members: int) -> None:
    whole = gzip.compress(b"data") * members + bytes(512)
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert b"".join(decode("gzip", pieces)) == b"data" * members
    many = gzip.compress(b"") * MEMBERS_MAX
    assert decode("gzip", [many, bytes(10**6)]) == []


@pytest.mark.parametrize("size", [1, 1_000])
@pytest.mark.parametrize(
    ("encoding", "whole"),
    [
        ("gzip", gzip.compress(b"data", mtime=0) + b"x"),
        ("gzip", gzip.compress(b"data", mtime=0) + b"\0x"),
        ("gzip", gzip.compress(b"data", mtime=0) + b"\0" + gzip.compress(b"data", mtime=0)),
        ("gzip", bytes(512)),
        ("gzip", b"\0" + gzip.compress(b"data", mtime=0)),
        ("deflate", zlib.compress(b"data") + b"\0"),
        ("zstd", zstd.compress(b"data") + b"\0"),
    ],
)
def test_other_bytes_after_a_body_are_bad(encoding: str, whole: bytes, size: int) -> None:
    with pytest.raises(BadEncodingError):
        decode(encoding, [whole[at : at + size] for at in range(0, len(whole), size)])


@pytest.mark.parametrize(("encoding", "encode"), ENCODERS)
def test_a_body_that_breaks_off_is_bad(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    whole = encode(random.Random(0).randbytes(1_000))
    with pytest.raises(BadEncodingError):
        decode(encoding, [whole[:-1]])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_body_in_another_format_is_bad(encoding: str) -> None:
    with pytest.raises(BadEncodingError):
        decode(encoding, [b'{"model": "demo"}' * 10])


@pytest.mark.parametrize(("encoding", "encode"), ENCODERS)
def test_a_bomb_is_decoded_in_small_pieces(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    pieces = Decoder(encoding).decode(encode(bytes(64 * 1024**2)))
    assert [len(next(pieces)) for _ in range(3)] == [PIECE_BYTES] * 3


@pytest.mark.parametrize(("encoding", "encode"), ENCODERS)
def test_many_members_that_decode_to_nothing_are_bad(
    encoding: str, encode: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(BadEncodingError):
        decode(encoding, [encode(b"") * (MEMBERS_MAX + 2)])


def test_a_window_larger_than_the_web_allows_is_bad() -> None:
    options: dict[int, int] = {
        zstd.CompressionParameter.window_log: 27,
        zstd.CompressionParameter.content_size_flag: 0,
    }
    compressor = zstd.ZstdCompressor(options=options)
    data = compressor.compress(bytes(1_000)) + compressor.flush()
    with pytest.raises(BadEncodingError):
        decode("zstd", [data])


@pytest.mark.parametrize("value", ["", "identity", " Identity "])
def test_a_plain_body_needs_no_decoder(value: str) -> None:
    assert find_decoder({"content-encoding": value}) is None
    assert find_decoder({}) is None


@pytest.mark.parametrize("value", ["gzip", "GZIP", "x-gzip", "deflate", "zstd"])
def test_known_encodings_have_a_decoder(value: str) -> None:
    assert isinstance(find_decoder({"content-encoding": value}), Decoder)


@pytest.mark.parametrize("value", ["br", "gzip, zstd", "compress"])
def test_other_encodings_are_refused(value: str) -> None:
    error = find_decoder({"content-encoding": value})
    assert isinstance(error, ApiError)
    assert (error.status, error.param) == (415, "content-encoding")
    assert (b"accept-encoding", b"gzip, deflate, zstd") in error.headers()
