"""What is looked through in pieces gives what looking through the whole gives."""

import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http import body_check, large_bytes
from gateway.http.large_bytes import PIECE_BYTES, contains, count, matches

LONE = body_check._LONE_SURROGATE
LONE_BYTES = body_check._SURROGATES_BYTES
WORDS = (b"\\u", b"d83d", b"de00", b"D8", b"dc", b"a", b"00", b"\\", b"[", b"]")
BODIES = st.lists(st.sampled_from(WORDS), max_size=60).map(b"".join)


@given(body=BODIES, piece=st.integers(1, 20))
def test_pieces_add_up_to_the_whole(body: bytes, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_bytes, "PIECE_BYTES", piece)
        patch.setattr(large_bytes, "BREATH_S", 0.0)
        assert count(body, b"[") == body.count(b"[")
        assert [contains(body, word) for word in WORDS] == [word in body for word in WORDS]
        assert matches(LONE, body, LONE_BYTES) == bool(LONE.search(body))


def pair_at(at: int) -> bytes:
    return b"x" * at + b"\\ud83d\\ude00" + b"x" * 20


@pytest.mark.parametrize("at", range(PIECE_BYTES - 14, PIECE_BYTES + 3))
def test_a_pair_of_surrogates_is_one_wherever_a_piece_ends(at: int) -> None:
    whole = pair_at(at)
    assert not matches(LONE, whole, LONE_BYTES)
    assert matches(LONE, whole[: at + 6] + whole[at + 12 :], LONE_BYTES), "the first half alone"
    assert matches(LONE, whole[:at] + whole[at + 6 :], LONE_BYTES), "the second half alone"


def test_other_threads_get_the_lock_between_pieces() -> None:
    """As often as the event loop takes it for one request, and more."""
    body, gaps_s, stop = b"[" * (16 * PIECE_BYTES), [], threading.Event()

    def take_the_lock() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0)
            now = time.perf_counter()
            gaps_s.append(now - last)
            last = now

    other = threading.Thread(target=take_the_lock)
    other.start()
    try:
        for _ in range(5):
            before = len(gaps_s)
            count(body, b"[")
            taken = len(gaps_s) - before
            if taken >= 15:
                break
    finally:
        stop.set()
        other.join()
    assert taken >= 15, "once per piece at least"


def test_what_is_short_is_looked_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: float) -> None:
        raise AssertionError("the event loop does not sleep")

    monkeypatch.setattr(time, "sleep", never)
    body = b"\\ud83d\\ude00" * 5_000
    assert len(body) < PIECE_BYTES
    assert contains(body, b"\\u")
    assert not matches(re.compile(rb"y"), body, 1)
    assert count(body, b"\\") == 10_000
    large_bytes.breathe(body)
