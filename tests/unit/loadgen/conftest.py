"""Records made by hand: what a request would leave, with only the times that a test is about."""

from collections.abc import Callable, Sequence

import pytest

from loadgen.report.records import Answer, Failure, FailureKind, Reply, RequestRecord
from loadgen.workload.plan import PlannedRequest

MakePlanned = Callable[..., PlannedRequest]
MakeRecord = Callable[..., RequestRecord]


def build_planned(
    index: int = 0,
    *,
    at_s: float | None = 0.0,
    phase_index: int = 0,
    tier: str | None = None,
    prompt_tokens: int = 10,
    output_tokens: int = 3,
    prefix_group: int | None = None,
    prefix_tokens: int = 0,
) -> PlannedRequest:
    return PlannedRequest(
        index=index,
        request_id=f"run-{index}",
        at_s=at_s,
        phase_index=phase_index,
        tier=tier,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefix_group=prefix_group,
        prefix_tokens=prefix_tokens,
    )


def build_record(
    planned: PlannedRequest | None = None,
    *,
    sent_s: float | None = 0.0,
    chunk_times_s: Sequence[float] = (0.1, 0.2, 0.3),
    ended_s: float | None = None,
    failure: FailureKind | None = None,
    usage: int | None = None,
    prompt_usage: int | None = None,
    saw_done: bool = True,
    served_tier: str | None = None,
) -> RequestRecord:
    end_s = ended_s if ended_s is not None else max([sent_s or 0.0, *chunk_times_s])
    answer = Answer(
        chunk_times_s=tuple(chunk_times_s),
        ended_s=end_s,
        finish_reason=None if failure else "stop",
        saw_done=saw_done,
        prompt_tokens=prompt_usage,
        output_tokens=usage,
    )
    return RequestRecord(
        # Sent when due, unless the test plans it otherwise.
        planned=planned or build_planned(at_s=sent_s),
        sent_s=sent_s,
        ended_s=end_s,
        reply=None if sent_s is None else Reply(200, "id", served_tier),
        answer=answer,
        failure=None if failure is None else Failure(failure, "code", "message"),
    )


@pytest.fixture
def make_planned() -> MakePlanned:
    return build_planned


@pytest.fixture
def make_record() -> MakeRecord:
    return build_record
