"""A task's tokens under every order of arrival: the client sees 0, 1, 2, ... once each."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from coordinator.protocol.messages.rank import TokenSpan
from coordinator.protocol.terms import TaskId
from gateway.token_stream import TokenStream, Trim, Verdict

TASK = TaskId("task")
LENGTH_MAX = 30


@dataclass
class Reader:
    """Does what the relay does, and notes (index, attempt) of every token that it delivers."""

    stream: TokenStream[TokenSpan] = field(default_factory=TokenStream)
    delivered: list[tuple[int, int]] = field(default_factory=list)
    ends: int = 0

    def feed(self, span: TokenSpan) -> None:
        answer = self.stream.offer(span)
        if answer is Verdict.HOLD:
            assert self.stream.hold(span, span)
        elif answer is not Verdict.DROP:
            self._take(span, answer)
        for ready, held in self.stream.ready():
            self._take(held, ready)
        assert [index for index, _ in self.delivered] == list(range(self.stream.expected))
        assert self.ends == int(self.stream.ended)

    def _take(self, span: TokenSpan, answer: Verdict | Trim) -> None:
        trim = answer if isinstance(answer, Trim) else Trim(0, span.count, span.finished)
        first = span.first + trim.skip
        self.delivered += [(first + place, span.attempt) for place in range(trim.keep)]
        self.ends += trim.finished


def cut(attempt: int, first: int, last: int, sizes: list[int], *, ends: bool) -> list[TokenSpan]:
    """Spans of an attempt over first..last-1."""
    spans: list[TokenSpan] = []
    for size in [*sizes, last]:
        count = min(size, last - first)
        if count > 0 or (ends and not spans and first == last):
            finished = ends and first + count == last
            spans.append(TokenSpan(TASK, attempt, first, count, finished))
            first += count
    return spans


@st.composite
def attempts(draw: st.DrawFn) -> list[list[TokenSpan]]:
    """Attempts of one task: each starts where the one before got to or earlier, the last ends."""
    length = draw(st.integers(1, LENGTH_MAX))
    number = draw(st.integers(1, 4))
    reached, out = 0, []
    for attempt in range(1, number + 1):
        first = draw(st.integers(0, reached))
        last = length if attempt == number else draw(st.integers(first, length))
        sizes = draw(st.lists(st.integers(1, 5), max_size=8))
        out.append(cut(attempt, first, last, sizes, ends=attempt == number))
        reached = last
    return out


def interleave(rng: random.Random, streams: list[list[TokenSpan]]) -> Iterator[TokenSpan]:
    """All spans, each stream in its own order."""
    waiting = [list(stream) for stream in streams if stream]
    while waiting:
        stream = rng.choice(waiting)
        yield stream.pop(0)
        waiting = [each for each in waiting if each]


@given(attempts(), st.randoms(use_true_random=False))
def test_every_index_once_and_in_order_whatever_arrives_when(
    streams: list[list[TokenSpan]], rng: random.Random
) -> None:
    spans = [span for stream in streams for span in stream]
    spans += rng.choices(spans, k=rng.randrange(len(spans) + 1))
    rng.shuffle(spans)
    reader = Reader()
    for span in spans:
        reader.feed(span)
    assert reader.stream.ended
    assert reader.stream.expected == streams[-1][-1].first + streams[-1][-1].count
    assert not reader.stream.holding


@given(attempts(), st.randoms(use_true_random=False))
def test_attempts_never_mix(streams: list[list[TokenSpan]], rng: random.Random) -> None:
    """Once a newer attempt is known, an older one counts only below the newer one's start."""
    reader = Reader()
    starts: dict[int, int] = {}
    for span in interleave(rng, streams):
        before = len(reader.delivered)
        starts.setdefault(span.attempt, span.first)
        reader.feed(span)
        for index, attempt in reader.delivered[before:]:
            newer = [first for other, first in starts.items() if other > attempt]
            assert index < min(newer, default=LENGTH_MAX)
    owners = [attempt for _, attempt in reader.delivered]
    assert owners == sorted(owners)
    assert reader.stream.ended


@given(attempts(), st.integers(0, 4), st.integers(0, 60), st.randoms(use_true_random=False))
def test_a_fenced_attempt_is_never_heard_again(
    streams: list[list[TokenSpan]], fenced: int, when: int, rng: random.Random
) -> None:
    reader = Reader()
    spans = list(interleave(rng, streams))
    for span in spans[:when]:
        reader.feed(span)
    if reader.stream.ended:
        return
    reader.stream.fence(fenced)
    before = len(reader.delivered)
    for span in spans[when:]:
        reader.feed(span)
    assert all(attempt > fenced for _, attempt in reader.delivered[before:])
    # What the task was placed again for: an attempt behind what was delivered ends the stream.
    for span in cut(9, before, LENGTH_MAX, [1, 2, 3], ends=True):
        reader.feed(span)
    assert reader.stream.ended


@given(attempts(), st.randoms(use_true_random=False))
def test_a_stream_without_surprises_is_forwarded_whole(
    streams: list[list[TokenSpan]], rng: random.Random
) -> None:
    stream: TokenStream[None] = TokenStream()
    last = streams[-1]
    shifted = [TokenSpan(TASK, 1, span.first - last[0].first, *span_rest(span)) for span in last]
    assert [stream.offer(span) for span in shifted] == [Verdict.FORWARD] * len(shifted)
    assert stream.ended
    assert stream.offer(rng.choice(shifted)) is Verdict.DROP


def span_rest(span: TokenSpan) -> tuple[int, bool]:
    return span.count, span.finished
