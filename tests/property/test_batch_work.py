"""Whatever happens to a batch, it ends once, and every line has exactly one result.

The machine plays the runner over a store that is a dictionary: lines are answered, refused and
cancelled in any order, records fail, gateways die and lose what was only in memory, time passes.
"""

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from gateway.batches import terms
from gateway.batches.lines import Result, split_results, with_results
from gateway.batches.next_step import PAUSE_S_MAX, TRIES_MAX, LineBook, Step, next_step
from gateway.batches.terms import ENDED, NEXT, BatchRecord, NotAllowedError, Status

STATUSES = st.sampled_from([200, 400, 404, 408, 429, 500, 503, 504])
WINDOW_S = 1_000


def new_batch(expires_at: int = WINDOW_S) -> BatchRecord:
    return BatchRecord(
        id="batch_1",
        tenant="t",
        endpoint="/v1/completions",
        input_file_id="file-1",
        created_at=0,
        expires_at=expires_at,
    )


def result_of(number: int, status: int) -> Result:
    return Result(number, f"{number}: {status}".encode(), 200 <= status < 300)


class BatchMachine(RuleBasedStateMachine):
    @initialize(total=st.integers(1, 8))
    def start(self, total: int) -> None:
        self.total = total
        self.now_s = 0.0
        self.stored = new_batch()
        self.results: dict[int, Result] = {}
        self.tries: dict[int, int] = {}
        self.book: LineBook | None = None
        self.files: list[tuple[bool, bytes]] | None = None

    @property
    def is_running(self) -> bool:
        return self.book is not None and next_step(self.stored, self.now_s) is Step.RUN

    @rule()
    def step(self) -> None:
        """The runner looks what is next."""
        now = int(self.now_s)
        match next_step(self.stored, self.now_s):
            case Step.VALIDATE:
                self.stored = terms.validated(self.stored, self.total, "m", now)
            case Step.RUN:
                if self.book is None:
                    self.book = LineBook(self.total, sorted(self.results))
            case Step.CLOSE:
                self.book = None
                self.stored = terms.changed(self.stored, Status.FINALIZING, now)
            case Step.WRITE:
                self.book = None
                self.write()
                self.stored = terms.ended(
                    self.stored, now, output_file_id="file-o", error_file_id="file-e"
                )
            case Step.NOTHING:
                assert self.stored.has_ended

    def write(self) -> None:
        ids = [(number, f"c{number}") for number in range(1, self.total + 1)]
        if not self.stored.counts.total:
            ids = []
        results = [self.results[number] for number in sorted(self.results)]
        self.files = list(split_results("batch_1", self.stored.status, ids, results))

    @precondition(lambda self: self.is_running)
    @rule(at_once=st.integers(1, 4))
    def begin(self, at_once: int) -> None:
        assert self.book is not None
        begun = self.book.begin(self.now_s, at_once)
        assert not set(begun) & self.results.keys(), "what has a result is not run again"
        assert self.book.on_their_way <= max(at_once, self.book.on_their_way - len(begun))

    @precondition(lambda self: self.is_running and self.book.in_flight)
    @rule(data=st.data(), status=STATUSES, wait_s=st.sampled_from([0.0, 5.0, 1e9]))
    def answer(self, data: Any, status: int, wait_s: float) -> None:
        assert self.book is not None
        number = data.draw(st.sampled_from(sorted(self.book.in_flight)))
        if self.book.is_final(number, status):
            self.book.answered(result_of(number, status), status)
            return
        if status not in (429, 503):
            self.tries[number] = self.tries.get(number, 0) + 1
            assert self.tries[number] < TRIES_MAX
        self.book.refused(number, status, self.now_s, wait_s)
        assert self.book.paused_until_s <= self.now_s + PAUSE_S_MAX

    @precondition(lambda self: self.is_running and self.book.answers())
    @rule(dies=st.booleans())
    def record(self, dies: bool) -> None:
        """Results reach the store; the gateway may die before it hears of it."""
        assert self.book is not None
        answers = self.book.answers()
        new = [result for result in answers if result.number not in self.results]
        assert len(new) == len(answers), "one gateway records a line once"
        self.stored = with_results(self.stored, new)
        self.results |= {result.number: result for result in new}
        if dies:
            self.crash()
        else:
            self.book.recorded(answers)

    @rule()
    def crash(self) -> None:
        self.book = None
        self.tries = {}

    @rule(seconds=st.sampled_from([0.5, 10.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def cancel(self) -> None:
        before = self.stored
        try:
            self.stored = terms.cancelling(before, int(self.now_s))
        except NotAllowedError:
            assert before.status in ENDED - {Status.CANCELLED} or before.status is Status.FINALIZING

    @invariant()
    def counts_are_those_of_the_results(self) -> None:
        if not hasattr(self, "stored"):
            return
        counts = self.stored.counts
        if not self.stored.has_ended:
            assert counts.completed == sum(result.is_ok for result in self.results.values())
            assert counts.done == len(self.results)
        assert counts.done <= counts.total or not counts.total
        assert set(self.stored.times) <= {status.value for status in Status}

    @invariant()
    def an_ended_batch_has_every_line_once(self) -> None:
        if not hasattr(self, "stored") or not self.stored.has_ended:
            return
        assert self.files is not None
        counts = self.stored.counts
        assert len(self.files) == counts.total
        assert counts.total == counts.completed + counts.failed
        assert sum(is_ok for is_ok, _ in self.files) == counts.completed
        if self.stored.status is Status.COMPLETED:
            assert {text for _, text in self.files} == {r.text for r in self.results.values()}

    def teardown(self) -> None:
        """Left alone with a server that answers, every batch ends."""
        if not hasattr(self, "stored"):
            return
        self.crash()
        for _ in range(6):
            self.step()
            if self.is_running:
                self.finish_lines()
        assert self.stored.has_ended

    def finish_lines(self) -> None:
        book = self.book
        assert book is not None
        while not book.is_done and next_step(self.stored, self.now_s) is Step.RUN:
            begun = book.begin(self.now_s, 3)
            assert begun, "lines that wait are begun"
            for number in begun:
                book.answered(result_of(number, 200), 200)
            answers = book.answers()
            self.stored = with_results(self.stored, answers)
            self.results |= {result.number: result for result in answers}
            book.recorded(answers)


TestBatchMachine = BatchMachine.TestCase
TestBatchMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("before", Status)
@pytest.mark.parametrize("after", Status)
def test_a_batch_goes_only_where_it_may(before: Status, after: Status) -> None:
    batch = msgspec.structs.replace(new_batch(), status=before)
    if after in NEXT[before]:
        assert terms.changed(batch, after, 5).times == {after.value: 5}
    else:
        with pytest.raises(NotAllowedError):
            terms.changed(batch, after, 5)


def test_a_full_server_is_left_alone_for_longer_and_longer() -> None:
    book = LineBook(3, ())
    pauses, now_s = [], 0.0
    for _ in range(8):
        (number,) = book.begin(now_s, 1)
        book.refused(number, 429, now_s)
        assert not book.begin(now_s, 1)
        pauses.append(book.paused_until_s - now_s)
        now_s = book.paused_until_s
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    (number,) = book.begin(now_s, 1)
    book.answered(result_of(number, 200), 200)
    assert book.begin(now_s, 2)
