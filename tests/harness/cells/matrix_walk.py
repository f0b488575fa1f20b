"""Takes a cell through a walk of switches, with the requests that each of them is to meet."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient
from tests.harness.cells.random_load import SILENT_MAX_S
from tests.harness.cells.switch_matrix import LAYOUTS, Kind, Moment, Plan, Row
from tests.harness.vllm.matrix_cases import Requests
from tests.harness.vllm.reshard_cases import Case, vllm_settings

CROWD = 4
"""Requests that come at once so that some wait for their turn."""
MET_TOKENS = 2
"""A request that has so many is in mid-decode."""
SETTLES_WITHIN_S = 30.0


@dataclass
class Met:
    """A request of a walk, the row that it was submitted for, and what came of it."""

    row: Row
    case: Case
    stream: Stream


@dataclass
class Switched:
    """What a row came to: the switch's record, and whether it came at the moment meant."""

    row: Row
    epoch: int
    is_met: bool
    paused: int
    """Tasks that an earlier switch had paused, and that were paused still."""
    record: dict[str, Any] = field(default_factory=dict)


class Walk:
    """Serves requests while it switches, one row after the other."""

    def __init__(
        self, cell: BareCell, client: TaskClient, requests: Requests, draw: random.Random
    ) -> None:
        self.met: list[Met] = []
        self.switched: list[Switched] = []
        self.overtaken = 0
        """Switches that gave way to others."""
        self._cell = cell
        self._client = client
        self._requests = requests
        self._draw = draw
        self._watching: set[asyncio.Task[None]] = set()
        self._early: Met | None = None
        """The request of the next row, where it is to cross the switch before that, too."""

    async def go(self, rows: list[Row]) -> None:
        """Make all switches, then wait until every stream has ended."""
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            try:
                await self._switch(row, following)
            except Exception as error:
                error.add_note(f"in row {len(self.switched)}: {row}")
                raise
        await self._all_ended()
        records = self._cell.get("/admin/switches?last=1000")["switches"]
        by_epoch = {record["epoch"]: record for record in records}
        for each in self.switched:
            each.record = by_epoch[each.epoch]
        first = self.switched[0].epoch
        self.overtaken = sum(
            epoch >= first and record["outcome"] == "superseded"
            for epoch, record in by_epoch.items()
        )

    async def _switch(self, row: Row, following: Row | None) -> None:
        crossing, self._early = self._early, None
        if row.moment is Moment.IDLE:
            await self._all_ended()
        if following is not None and following.moment is Moment.AFTER:
            self._early = self._submit(following, self._requests.for_row(following))
            await has_tokens(self._early.stream, 1)
        met = await self._meet(row, crossing)
        paused = (await self._get("/admin/status"))["queue"]["tasks"]["paused"]
        is_met = met is None or is_as_meant(row.moment, met.stream)
        switching = asyncio.create_task(self._ask(row))
        await asyncio.sleep(self._draw.uniform(0.0, 0.05))
        self._submit(row, self._requests.any())
        answer = await switching
        assert answer["layout"] == row.target, answer
        self.switched.append(Switched(row, answer["switch"]["epoch"], is_met, paused))
        await asyncio.to_thread(self._cell.pages)
        for each in [each for each in self._watching if each.done()]:
            self._watching.remove(each)
            each.result()

    async def _meet(self, row: Row, crossing: Met | None) -> Met | None:
        """Submit what the row's switch is to meet, and wait for the moment."""
        if row.kind is Kind.NONE:
            return None
        if row.moment is Moment.AFTER:
            return crossing
        if row.moment is Moment.QUEUE:
            for _ in range(CROWD):
                self._submit(row, self._requests.any())
        met = self._submit(row, self._requests.for_row(row))
        if row.moment in (Moment.PREFILL, Moment.QUEUE):
            await asyncio.sleep(self._draw.uniform(0.0, 0.02))
        else:
            await has_tokens(met.stream, MET_TOKENS)
        return met

    async def _ask(self, row: Row) -> Any:
        """Ask for the row's switch and wait until it serves."""
        cell = self._cell
        if row.moment is Moment.OVERTAKEN:
            other = self._draw.choice(LAYOUTS)  # Its own: then only the plan changes.
            plan = self._draw.choice([row.plan, Plan.RESHARD, Plan.PAUSE])
            for layout, how in ((row.target, row.plan), (other, plan)):
                await asyncio.to_thread(cell.ask, layout, how)
                await asyncio.sleep(self._draw.choice([0.0, 0.0, 0.001, 0.005, 0.02]))
        return await asyncio.to_thread(cell.switch, row.target, row.plan)

    def _submit(self, row: Row, case: Case) -> Met:
        name = f"walk-{len(self.met)}"
        stream = self._client.submit(name, case.prompt, **vllm_settings(case.params))
        self.met.append(Met(row, case, stream))
        self._watching.add(asyncio.create_task(self._watch(name, self.met[-1])))
        return self.met[-1]

    async def _watch(self, name: str, met: Met) -> None:
        """Follow a stream to its end, or to where its client leaves."""
        stream, leaves_after = met.stream, met.case.leaves_after
        had, since = 0, time.monotonic()
        about = f"seed {met.case.seed} of {met.row}"
        while not stream.finished:
            if leaves_after is not None and len(stream.tokens) >= leaves_after:
                self._client.cancel(name)
                break
            if len(stream.tokens) != had:
                had, since = len(stream.tokens), time.monotonic()
            assert time.monotonic() - since < SILENT_MAX_S, f"{about} hangs: {stream.tokens}"
            await asyncio.sleep(0.003)
        assert stream.failure is None, f"{about}: {stream.failure}"

    async def _all_ended(self) -> None:
        await asyncio.gather(*self._watching)
        self._watching.clear()
        deadline = time.monotonic() + SETTLES_WITHIN_S
        while any((tasks := (await self._get("/admin/status"))["queue"]["tasks"]).values()):
            assert time.monotonic() < deadline, tasks
            await asyncio.sleep(0.02)

    async def _get(self, path: str) -> Any:
        return await asyncio.to_thread(self._cell.get, path)


async def has_tokens(stream: Stream, count: int) -> None:
    """Wait until a stream has so many tokens, or none to come."""
    while len(stream.tokens) < count and not stream.finished:
        await asyncio.sleep(0.003)


def is_as_meant(moment: Moment, stream: Stream) -> bool:
    """Whether a request is where a switch is to meet it."""
    if moment in (Moment.PREFILL, Moment.QUEUE):
        return not stream.tokens
    return bool(stream.tokens) and not stream.finished


def met_by_moment(switched: list[Switched]) -> dict[str, tuple[int, int]]:
    """How many rows of each moment came at it, and how many there are."""
    rows = Counter(str(each.row.moment) for each in switched)
    met = Counter(str(each.row.moment) for each in switched if each.is_met)
    return {moment: (met[moment], count) for moment, count in rows.items()}
