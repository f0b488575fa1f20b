"""What a stream answers, case by case; `tests/property/test_token_stream.py` has the invariants."""

import pytest

from coordinator.protocol.messages.rank import TokenSpan
from coordinator.protocol.terms import TaskId
from gateway.token_stream import HELD_SPANS_MAX, TokenStream, Trim, Verdict


def span(first: int, count: int = 1, *, attempt: int = 1, finished: bool = False) -> TokenSpan:
    return TokenSpan(TaskId("task"), attempt, first, count, finished)


@pytest.fixture
def stream() -> TokenStream[str]:
    """Three tokens of attempt 1 were delivered."""
    stream: TokenStream[str] = TokenStream()
    assert stream.offer(span(0, 3)) is Verdict.FORWARD
    return stream


def test_next_span_is_forwarded(stream: TokenStream[str]) -> None:
    assert stream.offer(span(3, 2)) is Verdict.FORWARD
    assert stream.expected == 5


def test_repeated_span_is_dropped(stream: TokenStream[str]) -> None:
    assert stream.offer(span(0, 3)) is Verdict.DROP
    assert stream.offer(span(1, 1)) is Verdict.DROP


def test_overlapping_span_is_trimmed(stream: TokenStream[str]) -> None:
    assert stream.offer(span(1, 4, finished=True)) == Trim(2, 2, finished=True)
    assert stream.ended


def test_later_span_is_held_until_its_turn(stream: TokenStream[str]) -> None:
    assert stream.offer(span(4)) is Verdict.HOLD
    stream.hold(span(4), "four")
    assert list(stream.ready()) == []
    assert stream.offer(span(3)) is Verdict.FORWARD
    assert list(stream.ready()) == [(Verdict.FORWARD, "four")]
    assert stream.expected == 5


def test_held_spans_are_bounded(stream: TokenStream[str]) -> None:
    assert all(stream.hold(span(10 + place), "") for place in range(HELD_SPANS_MAX))
    assert not stream.hold(span(5_000), "")


def test_later_attempt_goes_on_without_what_is_told_once(stream: TokenStream[str]) -> None:
    assert stream.offer(span(3, 2, attempt=2)) == Trim(0, 2, finished=False)
    assert stream.offer(span(5, 1, attempt=2)) is Verdict.FORWARD


def test_later_attempt_that_starts_before_the_end_is_trimmed(stream: TokenStream[str]) -> None:
    assert stream.offer(span(1, 3, attempt=2)) == Trim(2, 1, finished=False)


def test_older_attempt_fills_the_gap_below_a_newer_one(stream: TokenStream[str]) -> None:
    assert stream.offer(span(4, attempt=2)) is Verdict.HOLD
    stream.hold(span(4, attempt=2), "four")
    assert stream.offer(span(3, 3)) == Trim(0, 1, finished=False)
    assert list(stream.ready()) == [(Trim(0, 1, finished=False), "four")]


def test_older_attempt_is_dropped_where_a_newer_one_went_on(stream: TokenStream[str]) -> None:
    stream.offer(span(3, attempt=2))
    assert stream.offer(span(4)) is Verdict.DROP
    assert stream.offer(span(6)) is Verdict.DROP


def test_older_attempt_is_not_held_where_a_newer_one_goes_on(stream: TokenStream[str]) -> None:
    assert stream.offer(span(5, attempt=2)) is Verdict.HOLD
    assert stream.offer(span(6)) is Verdict.DROP
    assert stream.offer(span(4)) is Verdict.HOLD


def test_fence_takes_nothing_of_old_attempts(stream: TokenStream[str]) -> None:
    stream.hold(span(5), "five")
    stream.fence(2)
    assert stream.attempt == 2
    assert stream.holding == 0
    assert stream.offer(span(3)) is Verdict.DROP
    assert stream.offer(span(3, attempt=2)) is Verdict.DROP
    assert stream.offer(span(3, attempt=3)) == Trim(0, 1, finished=False)


def test_late_fence_leaves_a_newer_attempt_alone(stream: TokenStream[str]) -> None:
    stream.offer(span(3, attempt=3))
    stream.fence(2)
    assert stream.offer(span(4, attempt=3)) is Verdict.FORWARD


def test_end_without_tokens_is_delivered(stream: TokenStream[str]) -> None:
    assert stream.offer(span(3, 0, finished=True)) is Verdict.FORWARD
    assert stream.ended
    assert stream.offer(span(3, 1)) is Verdict.DROP


def test_newest_attempt_that_ends_earlier_ends_the_stream(stream: TokenStream[str]) -> None:
    assert stream.offer(span(1, 1, attempt=2, finished=True)) == Trim(1, 0, finished=True)
    assert stream.ended
    assert stream.expected == 3


def test_end_of_a_replaced_attempt_is_not_the_stream_s(stream: TokenStream[str]) -> None:
    stream.offer(span(3, attempt=2))
    assert stream.offer(span(3, 1, finished=True)) is Verdict.DROP
    assert not stream.ended


def test_fence_leaves_nothing_held_of_its_own_attempt(stream: TokenStream[str]) -> None:
    assert stream.hold(span(5, attempt=2), "five")
    stream.fence(2)
    assert stream.holding == 0


def test_fence_forgets_no_start_of_a_newer_attempt(stream: TokenStream[str]) -> None:
    assert stream.offer(span(5, attempt=3)) is Verdict.HOLD
    stream.fence(1)
    assert stream.offer(span(3, 4, attempt=2)) == Trim(0, 2, finished=False)


def test_the_newest_attempt_is_told(stream: TokenStream[str]) -> None:
    assert stream.offer(span(3, attempt=2)) == Trim(0, 1, finished=False)
    assert stream.attempt == 2
    assert stream.offer(span(6, attempt=5)) is Verdict.HOLD
    stream.fence(1)
    assert stream.attempt == 5


def test_nothing_is_held_behind_the_end(stream: TokenStream[str]) -> None:
    assert stream.hold(span(9), "nine")
    assert stream.offer(span(3, finished=True)) is Verdict.FORWARD
    assert stream.holding == 0


def test_a_start_of_a_newer_attempt_is_not_waited_for_in_an_older_one(
    stream: TokenStream[str],
) -> None:
    assert stream.offer(span(5, attempt=2)) is Verdict.HOLD
    assert stream.offer(span(5)) is Verdict.DROP


def test_an_attempt_behind_the_first_token_is_a_later_one() -> None:
    stream: TokenStream[str] = TokenStream()
    assert stream.offer(span(0)) is Verdict.FORWARD
    assert stream.offer(span(1, attempt=2)) == Trim(0, 1, finished=False)
