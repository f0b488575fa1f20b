"""The relay between a front end, a coordinator and leaders that are all in the test's hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from comm_pool.layout import Rank
from coordinator.protocol import wire
from coordinator.protocol.messages.gateway import (
    Cancel,
    CellState,
    Done,
    GatewayUp,
    Resubmit,
    StreamGap,
    Submit,
    TaskFailed,
)
from coordinator.protocol.messages.rank import TokenBatch, TokenSpan
from coordinator.protocol.terms import TaskId, Tier
from gateway import token_stream
from gateway.engine.wire import AbortRequests, failure_of, read_request
from gateway.errors import RequestState, api_error, current_request
from gateway.open_requests import GAP_WAIT_S
from gateway.relay import relay as relay_module
from gateway.relay.relay import Relay

A, B = TaskId("chat-a"), TaskId("chat-b")


@dataclass
class Ends:
    """Both ends of a relay, and a clock."""

    said: list[GatewayUp] = field(default_factory=list)
    handed: list[Sequence[bytes]] = field(default_factory=list)
    now_s: float = 100.0

    def __post_init__(self) -> None:
        self.relay = Relay(
            self,
            self.handed.append,
            gateway="g",
            reply_to="tcp://here",
            clock=lambda: self.now_s,
        )
        self.relay.session_opened()

    def send(self, message: GatewayUp, cell: str) -> None:
        self.said.append(message)

    def add(self, task: str, priority: int = 0) -> None:
        request = EngineCoreRequest(
            task,
            [1, 2, 3],
            None,
            SamplingParams(max_tokens=9),
            None,
            1.0,
            None,
            None,
            None,
            priority=priority,
        )
        message = read_request(request)
        assert message is not None
        self.relay.on_front_end_message(message)

    def call(self, body: Any) -> None:
        frames = [bytes(frame) for frame in MsgpackEncoder().encode(body)]
        self.relay.front_end_called([EngineCoreRequestType.UTILITY.value, *frames])

    def push(self, *parts: tuple[TokenSpan, EngineCoreOutput], epoch: int = 1) -> list[bytes]:
        header = TokenBatch(Rank(0), 1, epoch, tuple(span for span, _ in parts))
        outputs = EngineCoreOutputs(outputs=[output for _, output in parts], timestamp=1.0)
        frames = [wire.encode(header), *(bytes(f) for f in MsgpackEncoder().encode(outputs))]
        self.relay.on_tokens(frames)
        return frames

    def outputs(self) -> list[EngineCoreOutput]:
        decoder = MsgpackDecoder(EngineCoreOutputs)
        return [output for frames in self.handed for output in decoder.decode(list(frames)).outputs]

    def tokens(self, task: str = A) -> list[int]:
        mine = [output for output in self.outputs() if output.request_id == task]
        return [token for output in mine for token in output.new_token_ids]


@pytest.fixture
def ends() -> Ends:
    ends = Ends()
    ends.add(A)
    ends.add(B)
    ends.said.clear()
    return ends


def part(
    task: TaskId,
    first: int,
    ids: list[int],
    *,
    attempt: int = 1,
    end: FinishReason | None = None,
    **fields: Any,
) -> tuple[TokenSpan, EngineCoreOutput]:
    output = EngineCoreOutput(task, ids, finish_reason=end, **fields)
    return TokenSpan(task, attempt, first, len(ids), end is not None), output


def test_the_http_side_is_told_how_long_the_request_waited() -> None:
    request = RequestState()
    token = current_request.set(request)
    ends = Ends()
    for choice in ("0_c", "1_c"):
        ends.add(choice)
    current_request.reset(token)
    ends.push((TokenSpan(TaskId("0_c"), 1, 0, 1, False, 30), EngineCoreOutput("0_c", [5])))
    assert request.queue_wait_ms == 30
    ends.push((TokenSpan(TaskId("1_c"), 1, 0, 1, False, 20), EngineCoreOutput("1_c", [5])))
    ends.push((TokenSpan(TaskId("0_c"), 1, 1, 1, False, 90), EngineCoreOutput("0_c", [6])))
    assert request.queue_wait_ms == 30, "the longest wait for a first token of its choices"


def test_the_http_side_learns_the_course_of_its_tasks() -> None:
    request = RequestState()
    token = current_request.set(request)
    ends = Ends()
    for task in ("0_c", "1_c", "d"):
        ends.add(task)
    current_request.reset(token)
    assert request.prompt_tokens == 6, "two prompts of three tokens, one of them with two choices"
    ends.now_s = 103.0
    ends.push(part(TaskId("1_c"), 0, [5]), epoch=1)
    ends.now_s = 104.0
    ends.push(part(TaskId("0_c"), 0, [5]), epoch=4)
    ends.push(part(TaskId("1_c"), 1, [5]), epoch=3)
    ends.relay.on_coordinator_message(CellState("tp2+dp1", 4, True, 3, 3, 0, 512))
    assert request.first_token_at_s == 103.0
    ends.push(part(TaskId("1_c"), 2, [5], end=FinishReason.STOP), epoch=4)
    assert (request.layout, request.group, request.switches) == ("tp2+dp1", "tp2", 3)
    ends.relay.on_front_end_message(AbortRequests(("d",)))
    assert (request.group, request.switches) == ("", 3), "a task without a token had no group"
    ends.relay.on_coordinator_message(CellState("dp3", 5, True, 3, 3, 0, 512))
    ends.relay.on_coordinator_message(TaskFailed(TaskId("0_c"), "internal_error", "lost", 0))
    assert (request.layout, request.group) == ("dp3", ""), "its last token is of another layout"


def test_request_is_submitted_with_its_sizes_and_tier() -> None:
    ends = Ends()
    ends.add(A, priority=10)
    [submit] = ends.said
    assert isinstance(submit, Submit)
    header = submit.header
    assert (header.task, header.gateway, header.reply_to) == (A, "g", "tcp://here")
    assert (header.prompt_tokens, header.max_tokens, header.tier) == (3, 9, Tier.BATCH)
    frames = wire.decode_frames(submit.payload)
    assert MsgpackDecoder(EngineCoreRequest).decode(list(frames)).request_id == A


def test_batch_in_order_is_handed_on_as_it_came(ends: Ends) -> None:
    frames = ends.push(part(A, 0, [5]), part(B, 0, [6]))
    assert ends.handed == [frames[1:]]
    task = ends.relay.book.get(A)
    assert task is not None
    assert list(task.delivered) == [5]


def test_end_is_told_and_the_task_forgotten(ends: Ends) -> None:
    ends.push(part(A, 0, [5], end=FinishReason.LENGTH), part(B, 0, [6]))
    assert ends.said == [Done(A)]
    assert [task.id for task in ends.relay.book] == [B]


def test_repeats_are_cut_out_of_a_batch(ends: Ends) -> None:
    ends.push(part(A, 0, [5, 6]), part(B, 0, [7]))
    ends.push(part(A, 1, [6, 8]), part(B, 0, [7]))
    assert ends.tokens(A) == [5, 6, 8]
    assert ends.tokens(B) == [7]


def test_spans_that_come_too_early_wait(ends: Ends) -> None:
    ends.push(part(A, 2, [7], end=FinishReason.STOP), part(B, 0, [1]))
    ends.push(part(A, 1, [6]))
    assert ends.tokens(A) == []
    assert ends.tokens(B) == [1]
    ends.push(part(A, 0, [5]), part(B, 1, [2]))
    assert ends.tokens(A) == [5, 6, 7]
    assert ends.tokens(B) == [1, 2]
    assert ends.said == [Done(A)]
    assert ends.outputs()[-2].finish_reason is FinishReason.STOP


def test_next_attempt_does_not_repeat_what_is_told_once(ends: Ends) -> None:
    stats = PrefillStats(num_prompt_tokens=3)
    ends.push(part(A, 0, [5], prefill_stats=stats))
    ends.push(part(A, 1, [6], attempt=2, prefill_stats=stats))
    ends.push(part(A, 2, [7], attempt=2))
    assert ends.tokens(A) == [5, 6, 7]
    assert [output.prefill_stats for output in ends.outputs()] == [stats, None, None]


def test_attempt_that_repeats_other_tokens_fails_the_task(ends: Ends) -> None:
    ends.push(part(A, 0, [5, 6]))
    ends.push(part(A, 1, [99, 7], attempt=2), part(B, 0, [1]))
    assert ends.tokens(A) == [5, 6]
    assert ends.tokens(B) == [1]
    failed = next(output for output in ends.outputs() if output.finish_reason)
    assert (failed.request_id, failed.finish_reason) == (A, FinishReason.ERROR)
    assert ends.said == [Cancel(A)]


def test_resubmit_goes_on_behind_what_was_delivered(ends: Ends) -> None:
    ends.push(part(A, 0, [5, 6]))
    ends.relay.on_coordinator_message(Resubmit(A, 2))
    [submit] = ends.said
    assert isinstance(submit, Submit)
    assert (submit.delivered_tokens, submit.attempt) == ((5, 6), 2)
    ends.push(part(A, 2, [99]))
    ends.push(part(A, 2, [7], attempt=3))
    assert ends.tokens(A) == [5, 6, 7]


def test_failed_task_ends_with_its_error(ends: Ends) -> None:
    ends.push(part(A, 0, [5]))
    ends.relay.on_coordinator_message(TaskFailed(A, "queue_full", "Full."))
    ends.relay.on_coordinator_message(TaskFailed(A, "queue_full", "Full."))
    ends.push(part(A, 1, [6]))
    failed = ends.outputs()[-1]
    assert failed.finish_reason is FinishReason.ERROR
    assert failure_of(failed.stop_reason).code == "queue_full"
    assert ends.tokens(A) == [5]
    assert ends.said == [Cancel(A)]


def test_aborted_task_is_cancelled_and_its_late_tokens_are_dropped(ends: Ends) -> None:
    ends.relay.on_front_end_message(AbortRequests((A,)))
    ends.push(part(A, 0, [5]), part(B, 0, [6]))
    assert ends.tokens(A) == []
    assert ends.tokens(B) == [6]
    assert ends.said == [Cancel(A)]


def test_tokens_of_an_unknown_task_cancel_it_once(ends: Ends) -> None:
    unknown = TaskId("unknown")
    for first in range(3):
        ends.push(part(unknown, first, [5]))
    assert ends.said == [Cancel(unknown)]
    assert ends.handed == []


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1", b"\xc1"]])
def test_push_without_a_header_changes_nothing(ends: Ends, frames: list[bytes]) -> None:
    ends.relay.on_tokens(frames)
    assert ends.handed == []
    ends.push(part(A, 0, [5]))
    assert ends.tokens(A) == [5]


ONE_TOKEN = [bytes(frame) for frame in MsgpackEncoder().encode(
    EngineCoreOutputs(outputs=[EngineCoreOutput(A, [1])])
)]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "payload"),
    [(1, []), (1, [b"\xc1"]), (2, ONE_TOKEN), (1, [ONE_TOKEN[0][:-1]])],
)
def test_push_whose_tokens_cannot_be_read_fails_its_streams(
    ends: Ends, count: int, payload: list[bytes]
) -> None:
    """It may have been their last one, so waiting for a gap to show is not enough."""
    span = TokenSpan(A, 1, 0, count, True)
    ends.relay.on_tokens([wire.encode(TokenBatch(Rank(0), 1, 1, (span,))), *payload])
    assert ends.said == [Cancel(A)]
    [failed] = ends.outputs()
    assert (failed.request_id, failed.finish_reason) == (A, FinishReason.ERROR)


def test_missing_token_fails_the_stream_after_a_while(ends: Ends) -> None:
    ends.push(part(A, 0, [5]))
    ends.push(part(A, 2, [7]))
    ends.now_s += GAP_WAIT_S
    ends.relay.tick()
    assert ends.said == []
    ends.now_s += 1
    ends.relay.tick()
    assert ends.said == [Cancel(A)]
    assert ends.outputs()[-1].finish_reason is FinishReason.ERROR


def test_gap_that_closes_is_forgotten(ends: Ends) -> None:
    ends.push(part(A, 1, [6]))
    ends.push(part(A, 0, [5]))
    ends.now_s += 10 * GAP_WAIT_S
    ends.relay.tick()
    assert ends.said == []


def test_too_many_early_spans_fail_the_stream(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "HELD_SPANS_MAX", 2)
    for first in range(1, 4):
        ends.push(part(A, first, [5]))
    assert ends.said == [Cancel(A)]


def test_pause_across_epochs_is_reported(ends: Ends) -> None:
    ends.push(part(A, 0, [5]), epoch=1)
    ends.now_s += 0.25
    ends.push(part(A, 1, [6]), epoch=2)
    [gap] = ends.said
    assert isinstance(gap, StreamGap)
    assert (gap.epoch, round(gap.gap_ms)) == (2, 250)


def test_streams_go_on_and_new_tasks_wait_while_the_coordinator_is_away(ends: Ends) -> None:
    ends.relay.on_coordinator_message(CellState("dp2", 1, True, 2, 2, 0, 512))
    seen = [ends.relay.cell]
    ends.relay.session_closed()
    seen.append(ends.relay.cell)
    assert [cell is None for cell in seen] == [False, True]
    ends.push(part(A, 0, [5]))
    ends.add("late")
    assert ends.tokens(A) == [5]
    assert ends.said == []
    submits = [each for each in ends.relay.session_opened() if isinstance(each, Submit)]
    assert [(each.header.task, each.delivered_tokens) for each in submits] == [
        (A, (5,)),
        (B, ()),
        ("late", ()),
    ]


def test_utility_call_is_answered(ends: Ends) -> None:
    ends.call((0, 3, "get_supported_tasks", ()))
    [frames] = ends.handed
    answer = MsgpackDecoder(EngineCoreOutputs).decode(list(frames)).utility_output
    assert answer is not None
    assert answer.call_id == 3


def test_bug_while_delivering_fails_the_streams_of_the_batch(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have counted tokens that the front end never got."""
    sent = ends.handed.append

    def broken(frames: Sequence[bytes]) -> None:
        monkeypatch.setattr(ends.relay, "_to_front_end", sent)
        raise ConnectionError

    monkeypatch.setattr(ends.relay, "_to_front_end", broken)
    ends.push(part(A, 0, [5]))
    assert ends.outputs()[-1].finish_reason is FinishReason.ERROR
    ends.push(part(A, 1, [6]), part(B, 0, [1]))
    assert ends.tokens(A) == []
    assert ends.tokens(B) == [1]


def test_what_is_open_at_the_end_is_failed(ends: Ends) -> None:
    ends.relay.give_up(api_error("draining", "Bye."))
    assert {failure_of(output.stop_reason).code for output in ends.outputs()} == {"draining"}
    assert ends.said == [Cancel(A), Cancel(B)]


def test_prompt_that_is_too_large_is_refused(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "PAYLOAD_BYTES_MAX", 10)
    ends.add("large")
    assert ends.said == []
    assert failure_of(ends.outputs()[0].stop_reason).code == "request_too_large"
