"""Switches under load: what each phase takes, what clients see of it, and whether anything grows.

`pause`: both layouts have streams of their own, so each finds paused tasks to run at once.
Other carry plans: one set of streams goes on in whatever layout serves.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

from tests.bench.gpu_cell import SETTLE_S, RunningCell
from tests.bench.gpu_load import StreamLog, prompt
from tests.bench.gpu_numbers import (
    cut_over_gaps,
    phases,
    spread,
    stream_gaps,
    totals,
)
from tests.bench.gpu_servers import gpu_memory_mib
from tests.bench.gpu_shapes import Plan

START_LIMIT_S = 60
"""Until all streams have their first token."""
GO_ON_LIMIT_S = 20
"""Until all streams have tokens of the new layout."""
GO_ON_TOKENS = 3
REPORTS_S = 1.0
"""After the last switch, until ranks have sent what they measured of it."""
DRAIN_TOKENS = (32, 64)
SWITCHES_MAX = {"drain": 6, "recompute": 6}
"""Plans that take long by their nature."""
STEP_S = 0.005


class SwitchRun:
    """One carry plan under load."""

    def __init__(self, cell: RunningCell, layouts: tuple[str, str], plan: Plan, carry: str) -> None:
        self._cell = cell
        self._client = cell.client
        self._layouts = layouts
        self._plan = plan
        self._carry = carry
        self._numbers = itertools.count()
        self._random = random.Random(1)
        self._tokens = DRAIN_TOKENS if carry == "drain" else plan.stream_tokens
        self._running: dict[str, list[StreamLog]] = {}
        self._epochs: list[int] = []

    async def measure(self) -> dict[str, Any]:
        """Switch to and fro, then sum up."""
        before_mib, before = gpu_memory_mib(), await self._cell.facts()
        started = time.monotonic()
        stopped = ""
        count = min(self._plan.switches, SWITCHES_MAX.get(self._carry, self._plan.switches))
        try:
            await (self._two_sets(count) if self._carry == "pause" else self._one_set(count))
        except (AssertionError, TimeoutError) as error:
            stopped = f"{type(error).__name__}: {error}"[:500]
        took_s = time.monotonic() - started
        await asyncio.sleep(REPORTS_S)
        result = {"seconds": round(took_s, 2), "stopped": stopped, **await self._summary()}
        await self._client.clear()
        await asyncio.sleep(3 * SETTLE_S)
        after = await self._cell.facts()
        return result | {
            "gpu_memory_mib": {"before": before_mib, "after": gpu_memory_mib()},
            "gauges": {"before": before["gauges"], "after": after["gauges"]},
        }

    async def _two_sets(self, count: int) -> None:
        for layout in self._layouts:
            await self._switch(layout)
            await self._top_up(layout)
            await self._until(self._all_started(layout), START_LIMIT_S)
        self._begin()
        for turn in range(count):
            layout = self._layouts[turn % 2]
            await self._switch(layout)
            await self._top_up(layout)
            await self._stay()

    async def _one_set(self, count: int) -> None:
        await self._switch(self._layouts[0], "recompute")
        await self._top_up("all")
        await self._until(self._all_started("all"), START_LIMIT_S)
        self._begin()
        for turn in range(count):
            await self._stay()
            await self._switch(self._layouts[(turn + 1) % 2])
            if self._carry != "drain":
                await self._until(self._all_go_on, GO_ON_LIMIT_S)
            await self._top_up("all")
            # All streams run when the next switch comes: what it costs is not a prompt's step.
            await self._until(self._all_started("all"), START_LIMIT_S)

    def _begin(self) -> None:
        """What came before was preparation."""
        self._epochs.clear()
        newest = self._client.batches[-1:]
        self._client.batches[:] = newest

    async def _switch(self, layout: str, carry: str | None = None) -> None:
        self._epochs.append(await self._cell.switch(layout, carry or self._carry))

    async def _stay(self) -> None:
        await asyncio.sleep(self._random.uniform(*self._plan.stay_ms) / 1e3)

    async def _top_up(self, owner: str) -> None:
        """Send streams until `owner` has as many as planned; while its layout serves."""
        running = [log for log in self._running.get(owner, []) if not log.done.done()]
        for number in range(len(running), self._plan.streams):
            ids = prompt(self._plan.switch_prompt, number, self._plan.vocab)
            name = f"{self._carry}-{owner}-{next(self._numbers)}"
            tokens = self._random.randint(*self._tokens)
            running.append(await self._client.start(name, self._client.prepare(name, ids, tokens)))
        self._running[owner] = running

    def _all_started(self, owner: str) -> Callable[[], bool]:
        return lambda: all(log.times or log.done.done() for log in self._running[owner])

    def _all_go_on(self) -> bool:
        epoch = self._epochs[-1]
        logs = itertools.chain.from_iterable(self._running.values())
        return all(
            log.done.done() or log.epochs[-GO_ON_TOKENS:] == [epoch] * GO_ON_TOKENS for log in logs
        )

    async def _until(self, holds: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"streams did not go on within {limit_s} s")
            await asyncio.sleep(STEP_S)

    async def _summary(self) -> dict[str, Any]:
        epochs = set(self._epochs)
        last = len(self._epochs) + 1
        records = [r for r in await self._cell.switches(last) if r["epoch"] in epochs]
        crossing, within = stream_gaps(
            (log.times, log.epochs) for log in self._client.logs.values()
        )
        gaps = cut_over_gaps(self._client.batches)
        summary: dict[str, Any] = {
            "switches": len(records),
            "streams": self._plan.streams,
            "phases": phases(records),
            "totals": totals(records),
            "client_cut_over_ms": spread(gap for epoch, gap in gaps.items() if epoch in epochs),
            "token_interval_ms": spread(within),
            "records": records,
        }
        if self._carry != "pause":  # A paused stream waits by design until its layout is back.
            each = [gap for epoch in epochs for gap in crossing.get(epoch, [])]
            summary["client_stall_ms"] = spread(each)
            summary["client_gaps_ms"] = {
                str(epoch): spread(crossing[epoch]) for epoch in epochs if crossing.get(epoch)
            }
            summary["client_stall_worst_ms"] = spread(
                max(crossing[epoch]) for epoch in epochs if crossing.get(epoch)
            )
        return summary
