"""Sessions in a report: how many ran to their end, and the latency of each turn. Pure.

A turn is due after the answer before it, so a slow server spreads the turns of a session. A turn
without a whole answer ends its session, and the turns after it are never sent: they count nowhere
else, so `cut_short` tells of them.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from loadgen.report.records import RequestRecord, ttft_ms
from loadgen.report.stats import rounded, summarise


def summarise_sessions(
    records: Sequence[RequestRecord], session_turns: Mapping[str, int]
) -> dict[str, object]:
    """Return counts of sessions and turns, and `by_turn`, whose turns count from 1.

    `session_turns` has every planned session and its number of turns. A session is finished if the
    last of them has a whole answer, and cut short if one that was due has none.
    """
    turns: dict[int, list[RequestRecord]] = {}
    for record in records:
        if record.planned.session is not None:
            turns.setdefault(record.planned.turn, []).append(record)
    sent = [record for each in turns.values() for record in each]
    finished = sum(
        record.ok and record.planned.turn + 1 == session_turns[record.planned.session]
        for record in sent
        if record.planned.session is not None
    )
    return {
        "planned": len(session_turns),
        "started": len(turns.get(0, [])),
        "finished": finished,
        "cut_short": sum(not record.ok for record in sent),
        "turns": len(sent),
        "turns_planned": sum(session_turns.values()),
        "by_turn": [_turn(turn, turns[turn]) for turn in sorted(turns)],
    }


def _turn(turn: int, scheduled: Sequence[RequestRecord]) -> dict[str, object]:
    """Return one turn of all sessions; latencies of whole answers, tokens by the server's count."""
    whole = [record for record in scheduled if record.ok]
    counted = [
        record.answer.prompt_tokens for record in whole if record.answer.prompt_tokens is not None
    ]
    return {
        "turn": turn + 1,
        "requests": len(scheduled),
        "ok": len(whole),
        "prompt_tokens_mean": rounded(fmean(counted)) if counted else None,
        "ttft_ms": summarise(ttft_ms(record) for record in whole),
    }
