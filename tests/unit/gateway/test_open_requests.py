"""The book of open tasks: each ends once, and a new session repairs what a broken one lost."""

import pytest
from msgspec.structs import replace

from coordinator.protocol.messages.gateway import Cancel, Done, Submit
from coordinator.protocol.messages.rank import TokenSpan
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId
from gateway import open_requests
from gateway.errors import ApiError, RequestState
from gateway.open_requests import ONE_CELL, GapMeter, OpenRequest, OpenRequests, family

A, B = TaskId("chat-a"), TaskId("chat-b")


def header(task: TaskId) -> TaskHeader:
    return TaskHeader(task, "gateway", "tcp://127.0.0.1:1", prompt_tokens=3, max_tokens=8)


@pytest.fixture
def book() -> OpenRequests:
    book = OpenRequests()
    book.session_opened()
    return book


def open_task(book: OpenRequests, task: TaskId, now_s: float = 0.0) -> OpenRequest:
    book.open(header(task), b"payload", now_s)
    opened = book.get(task)
    assert opened is not None
    return opened


def deliver(task: OpenRequest, ids: list[int], *, attempt: int = 1) -> None:
    task.stream.offer(TokenSpan(task.id, attempt, task.stream.expected, len(ids), finished=False))
    task.delivered.extend(ids)


def test_task_is_submitted_when_it_comes(book: OpenRequests) -> None:
    assert book.open(header(A), b"payload", 0.0) == Submit(header(A), b"payload", (), 0)
    assert len(book) == 1


def test_a_stream_that_is_too_far_behind_is_told(book: OpenRequests) -> None:
    """Counted over all choices of a request; who reads as much as comes is never told."""
    ended: list[str] = []
    slow, quick = RequestState(), RequestState()
    slow.give_up, quick.give_up = lambda: ended.append("slow"), lambda: ended.append("quick")
    for name, request in (("0_a", slow), ("1_a", slow), ("b", quick)):
        book.open(header(TaskId(name)), b"payload", 0.0, request=request)
    book.open(header(TaskId("c")), b"payload", 0.0)
    slow.relayed_tokens = open_requests.UNREAD_TOKENS_MAX
    quick.relayed_tokens = 10 * open_requests.UNREAD_TOKENS_MAX
    quick.generated_tokens = quick.relayed_tokens - 1
    assert book.unread() == []
    slow.relayed_tokens += 1
    [give_up] = book.unread()
    give_up()
    assert ended == ["slow"]


def test_task_without_session_waits_for_the_next(book: OpenRequests) -> None:
    book.session_closed()
    assert book.open(header(A), b"payload", 0.0) is None
    assert book.session_opened() == [Submit(header(A), b"payload", (), 0)]


def test_next_session_gets_open_tasks_behind_what_was_delivered_and_recent_ends(
    book: OpenRequests,
) -> None:
    deliver(open_task(book, A), [5, 6], attempt=3)
    open_task(book, B)
    book.finish(B)
    book.session_closed()
    assert book.session_opened() == [Done(B), Submit(header(A), b"payload", (5, 6), 3)]


def test_resubmit_tells_the_tokens_and_the_attempt_that_is_over(book: OpenRequests) -> None:
    task = open_task(book, A)
    deliver(task, [5, 6])
    assert book.resubmit(A, 2) == Submit(header(A), b"payload", (5, 6), 2, void_attempt=2)
    assert task.stream.attempt == 2


def test_resubmit_of_a_task_that_ended_repeats_its_end(book: OpenRequests) -> None:
    open_task(book, A)
    open_task(book, B)
    book.finish(A)
    book.cancel([B])
    assert book.resubmit(A, 1) == Done(A)
    assert book.resubmit(B, 1) == Cancel(B)
    assert book.resubmit(TaskId("never"), 1) == Cancel(TaskId("never"))


def test_cancelled_task_is_told_once(book: OpenRequests) -> None:
    open_task(book, A)
    assert book.cancel([A, TaskId("never"), A]) == [(ONE_CELL, Cancel(A))]
    assert book.cancel([A]) == []
    assert book.stray(A) is None


def test_tokens_of_an_unknown_task_cancel_it_once_per_session(book: OpenRequests) -> None:
    assert book.stray(A) == Cancel(A)
    assert book.stray(A) is None
    book.session_closed()
    book.session_opened()
    assert book.stray(A) == Cancel(A)


def test_one_choice_of_a_request_takes_its_siblings_along(book: OpenRequests) -> None:
    first, second, other = TaskId("0_chat-x"), TaskId("1_chat-x"), TaskId("0_chat-y")
    for task in (first, second, other):
        open_task(book, task)
    failed, messages = book.fail(second)
    assert failed == [second, first]
    assert messages == [(ONE_CELL, Cancel(second)), (ONE_CELL, Cancel(first))]
    assert [task.id for task in book] == [other]
    assert book.fail(second) == ([], [])


@pytest.mark.parametrize(
    ("task", "parent"),
    [("0_chat-x", "chat-x"), ("12_a_b", "a_b"), ("chat_x", "chat_x"), ("_x", "_x")],
)
def test_family(task: str, parent: str) -> None:
    assert family(TaskId(task)) == parent


def test_tasks_and_their_bytes_are_bounded(
    book: OpenRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_requests, "OPEN_TASKS_MAX", 2)
    monkeypatch.setattr(open_requests, "PAYLOAD_BYTES_MAX", 10)
    open_task(book, A)
    refusal = book.open(header(B), b"payload", 0.0)
    assert isinstance(refusal, ApiError)
    assert refusal.status == 429
    book.open(header(B), b"pay", 0.0)
    assert book.payload_bytes == 10
    refusal = book.open(header(TaskId("c")), b"", 0.0)
    assert isinstance(refusal, ApiError)
    book.finish(A)
    assert book.payload_bytes == 3
    assert isinstance(book.open(header(TaskId("c")), b"", 0.0), Submit)


def test_task_that_the_coordinator_never_got_is_given_up(book: OpenRequests) -> None:
    book.session_closed()
    open_task(book, A, now_s=10.0)
    assert book.expired(10.0 + open_requests.SUBMIT_WAIT_S) == []
    [(task, error)] = book.expired(10.1 + open_requests.SUBMIT_WAIT_S)
    assert (task, error.status, error.code) == (A, 503, "no_healthy_workers")
    book.session_opened()
    assert book.expired(1_000.0) == []


def test_stream_that_misses_a_token_is_given_up(book: OpenRequests) -> None:
    open_task(book, A).held_since_s = 1.0
    assert book.expired(1.0 + open_requests.GAP_WAIT_S) == []
    [(task, error)] = book.expired(1.1 + open_requests.GAP_WAIT_S)
    assert (task, error.status) == (A, 500)


WOKE_S = 2.0 + open_requests.STALL_S + 10 * open_requests.SUBMIT_WAIT_S


def test_a_token_may_have_come_while_the_gateway_stood_still(book: OpenRequests) -> None:
    open_task(book, A).held_since_s = 1.0
    assert book.expired(2.0) == []
    left_s = open_requests.GAP_WAIT_S - 1.0
    for second in range(int(left_s) + 1):
        assert book.expired(WOKE_S + second) == []
    [(task, error)] = book.expired(WOKE_S + left_s + 0.1)
    assert (task, error.code) == (A, "internal_error")


def test_the_coordinator_may_have_come_while_the_gateway_stood_still(book: OpenRequests) -> None:
    book.session_closed()
    open_task(book, A)
    assert book.expired(2.0) == []
    assert book.expired(WOKE_S) == []
    [(task, error)] = book.expired(WOKE_S + 1)
    assert (task, error.code) == (A, "no_healthy_workers")


def test_a_deadline_passes_while_the_gateway_stands_still(book: OpenRequests) -> None:
    book.open(replace(header(A), deadline_ms=1_000), b"payload", 0.0)
    assert book.expired(0.0) == []
    [(task, error)] = book.expired(WOKE_S)
    assert (task, error.code) == (A, "deadline_exceeded")


def test_ended_tasks_are_remembered_up_to_a_limit(
    book: OpenRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_requests, "ENDED_REMEMBERED", 2)
    for number in range(4):
        open_task(book, TaskId(f"t{number}"))
        book.finish(TaskId(f"t{number}"))
    assert book.session_opened() == [Done(TaskId("t2")), Done(TaskId("t3"))]


def test_longest_gap_of_each_epoch_is_reported(book: OpenRequests) -> None:
    meter = GapMeter()
    a, b = open_task(book, A), open_task(book, B)
    for task in (a, b):
        meter.tokens_arrived(task, 1, 10.0)
    assert meter.due(10.0) == []
    meter.tokens_arrived(a, 2, 10.2)
    [gap] = meter.due(10.2)
    assert gap.epoch == 2
    assert gap.gap_ms == pytest.approx(200)
    meter.tokens_arrived(b, 2, 10.25)
    assert meter.due(10.26) == [], "reports of one epoch are spaced"
    assert [round(gap.gap_ms) for gap in meter.due(10.4)] == [250]
    meter.tokens_arrived(b, 2, 19.0)
    meter.tokens_arrived(b, 1, 29.0)
    assert meter.due(30.0) == [], "only crossing into a newer epoch counts"
