"""Live counters and the line that shows them."""

import asyncio
import contextlib
import io

import pytest
from rich.console import Console

from loadgen.client import progress
from loadgen.client.meter import RECENT_S, Meter
from loadgen.client.progress import describe, show_progress


def busy_meter() -> Meter:
    meter = Meter(planned=10)
    for _ in range(4):
        meter.sent()
    meter.finished(failed=False)
    meter.finished(failed=True)
    meter.dropped()
    return meter


def test_counts() -> None:
    seen = busy_meter().snapshot(1.0)
    assert (seen.planned, seen.sent, seen.done, seen.errors, seen.dropped) == (10, 4, 2, 1, 1)
    assert (seen.in_flight, seen.over) == (2, 3)


def test_only_recent_tokens_count() -> None:
    meter = Meter(1)
    meter.chunks(1000, 0.0)
    meter.chunks(10, 9.0)
    meter.first_token(500.0, 0.0)
    meter.first_token(40.0, 9.0)
    seen = meter.snapshot(10.0)
    assert seen.chunks_per_s == 10 / RECENT_S
    assert seen.ttft_p50_ms == 40.0


def test_rates_before_the_first_window_is_full() -> None:
    meter = Meter(1)
    meter.chunks(10, 0.5)
    assert meter.snapshot(1.0).chunks_per_s == 10
    assert meter.snapshot(0.0).chunks_per_s == 0


def test_the_line_names_every_number() -> None:
    line = describe(busy_meter().snapshot(1.0))
    assert line == "sent 4/10, done 2, errors 1, dropped 1, 0 chunks/s, TTFT -"


@pytest.mark.parametrize("terminal", [True, False])
async def test_progress_is_shown_until_cancelled(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.01)
    monkeypatch.setattr(progress, "PLAIN_LINE_S", 0.01)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=160)
    meter = busy_meter()
    showing = asyncio.create_task(show_progress(lambda: meter.snapshot(1.0), console))
    await asyncio.sleep(0.1)
    showing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await showing
    assert screen.getvalue().count("sent 4/10") > 2
