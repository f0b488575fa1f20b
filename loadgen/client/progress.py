"""The progress line on stderr: redrawn on a terminal, a plain line now and then elsewhere.

It only shows `meter` snapshots. Redraws are rare, because drawing blocks the event loop that times
the streams.
"""

import asyncio
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.client.meter import Snapshot

REDRAW_S = 0.5
PLAIN_LINE_S = 5.0


def describe(snapshot: Snapshot) -> str:
    """Return one line of numbers, short enough for 80 columns; TTFT is the recent median."""
    first = "-" if snapshot.ttft_p50_ms is None else f"{snapshot.ttft_p50_ms:.0f} ms"
    dropped = f", dropped {snapshot.dropped}" if snapshot.dropped else ""
    return (
        f"sent {snapshot.sent}/{snapshot.planned}, done {snapshot.done}, "
        f"errors {snapshot.errors}{dropped}, {snapshot.chunks_per_s:.0f} chunks/s, TTFT {first}"
    )


async def show_progress(look: Callable[[], Snapshot], console: Console) -> None:
    """Show the run until cancelled; the last state stays on the screen."""
    if not console.is_terminal:
        await _print_lines(look, console)
        return
    columns = (TimeElapsedColumn(), BarColumn(bar_width=10), TextColumn("{task.description}"))
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task(describe(look()), total=look().planned)
        try:
            while True:
                await asyncio.sleep(REDRAW_S)
                snapshot = look()
                progress.update(task, description=describe(snapshot), completed=snapshot.over)
                progress.refresh()
        finally:
            snapshot = look()
            progress.update(task, description=describe(snapshot), completed=snapshot.over)
            progress.refresh()


async def _print_lines(look: Callable[[], Snapshot], console: Console) -> None:
    try:
        while True:
            await asyncio.sleep(PLAIN_LINE_S)
            console.print(describe(look()), highlight=False, soft_wrap=True)
    finally:
        console.print(describe(look()), highlight=False, soft_wrap=True)
