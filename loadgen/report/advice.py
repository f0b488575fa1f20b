"""Warnings that a report's numbers are incomplete or estimated. Pure.

Dropped requests, estimated token counts, or prompts of an unexpected length do not fail a run, but
the report's reader must know.
"""

from collections.abc import Sequence

from loadgen.report.records import (
    FailureKind,
    RequestRecord,
    output_tokens,
    served_at_other_tier,
)

PROMPT_LENGTH_TOLERANCE = 0.2


def warnings_for(records: Sequence[RequestRecord], *, ignore_eos: bool) -> list[str]:
    """Return one sentence for every reason to doubt the run."""
    whole = [record for record in records if record.ok]
    found = (
        _dropped(records),
        _no_usage(whole),
        _no_done(whole),
        _wrong_length(whole) if ignore_eos else None,
        _prompt_length(whole),
        _other_tier(records),
        _cut_short(records),
    )
    return [sentence for sentence in found if sentence is not None]


def wrong_lengths(whole: Sequence[RequestRecord]) -> int:
    """Return how many answers' `usage` differs from the tokens asked for."""
    return sum(
        record.answer.output_tokens is not None
        and record.answer.output_tokens != record.planned.output_tokens
        for record in whole
    )


def _dropped(records: Sequence[RequestRecord]) -> str | None:
    dropped = sum(
        record.failure is not None and record.failure.kind is FailureKind.DROPPED_BY_CLIENT
        for record in records
    )
    if not dropped:
        return None
    return (
        f"{dropped} requests were never sent because --max-in-flight was reached: raise it, or "
        "lower the rate."
    )


def _no_usage(whole: Sequence[RequestRecord]) -> str | None:
    missing = sum(record.answer.output_tokens is None for record in whole)
    if not missing:
        return None
    return f"{missing} answers had no usage; their chunks with text were counted as tokens."


def _no_done(whole: Sequence[RequestRecord]) -> str | None:
    missing = sum(not record.answer.saw_done for record in whole)
    return f"{missing} whole answers ended without [DONE]." if missing else None


def _wrong_length(whole: Sequence[RequestRecord]) -> str | None:
    wrong = wrong_lengths(whole)
    if not wrong:
        return None
    asked = sum(record.planned.output_tokens for record in whole)
    got = sum(output_tokens(record) for record in whole)
    return (
        f"{wrong} answers did not have the length that --ignore-eos asked for "
        f"({got} tokens in all instead of {asked})."
    )


def _prompt_length(whole: Sequence[RequestRecord]) -> str | None:
    counted = [record for record in whole if record.answer.prompt_tokens is not None]
    asked = sum(record.planned.input_tokens for record in counted)
    got = sum(record.answer.prompt_tokens or 0 for record in counted)
    if not asked or abs(got / asked - 1) <= PROMPT_LENGTH_TOLERANCE:
        return None
    return (
        f"The server counted {got / asked:.2f} prompt tokens for each one asked for; "
        "--tokens-per-word corrects that for word prompts."
    )


def _other_tier(records: Sequence[RequestRecord]) -> str | None:
    moved = sum(served_at_other_tier(record) for record in records)
    return f"{moved} requests were served at another tier than asked for." if moved else None


def _cut_short(records: Sequence[RequestRecord]) -> str | None:
    cut = sum(record.planned.session is not None and not record.ok for record in records)
    if not cut:
        return None
    return (
        f"{cut} sessions ended early, at a turn without a whole answer; later turns were not sent."
    )
