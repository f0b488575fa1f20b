"""The one task that owns the core: it feeds in events one at a time and carries out the effects.

Invariant: a session becomes the one that effects reach in the same step in which the core hears of
it, so no message decided for an earlier session reaches a later one. Every poster waits until its
event was handled, so the inbox holds at most one event per session and admin call.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, assert_never

import structlog

from comm_pool.layout import Rank
from coordinator.model.events import (
    Effect,
    Event,
    ForecastMade,
    Level,
    Note,
    Observed,
    SwitchRecorded,
    Tick,
    ToGateway,
    ToLauncher,
    ToRank,
)
from coordinator.model.observation_log import Line
from coordinator.model.records import SwitchRecord
from coordinator.protocol.messages.gateway import BatchProgress
from coordinator.server.outbox import Outbox

log = structlog.get_logger()


def monotonic_ms() -> int:
    """Milliseconds of this process' monotonic clock."""
    return time.monotonic_ns() // 1_000_000


def _always() -> bool:
    return True


class Watcher(Protocol):
    """Sees what goes through the core, to measure it; decides nothing."""

    def saw_event(self, event: Event, now_ms: int) -> None:
        """The core was handed an event."""

    def saw_effect(self, effect: Effect, now_ms: int) -> None:
        """The core asked for something."""


class Decider(Protocol):
    """The part of the core that its owner needs."""

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Decide what follows from `event`."""


@dataclass(frozen=True, slots=True)
class _Posted:
    event: Event
    admit: Callable[[], bool]
    handled: asyncio.Future[None] | None


class CoreActor:
    """Runs a core; the outboxes are those of the sessions that effects reach."""

    def __init__(self, core: Decider, tick_ms: float, clock: Callable[[], int]) -> None:
        self._core = core
        self._tick_s = tick_ms / 1000
        self._clock = clock
        self._inbox: asyncio.Queue[_Posted] = asyncio.Queue()
        self.rank_outboxes: dict[Rank, Outbox] = {}
        self.gateway_outboxes: dict[str, Outbox] = {}
        self.launcher_outboxes: set[Outbox] = set()
        self.batches: dict[str, tuple[BatchProgress, ...]] = {}
        """What each gateway said last of the batches that it runs; the core does not care."""
        self.on_switch: Callable[[SwitchRecord], None] = lambda _: None
        self.watchers: tuple[Watcher, ...] = ()
        self.on_observation: Callable[[Line], None] = lambda _: None

    async def post(self, event: Event, admit: Callable[[], bool] = _always) -> None:
        """Hand over `event` and wait until it was handled.

        `admit` is asked in the same step, just before; if it says no, the event is dropped.
        """
        handled = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Posted(event, admit, handled))
        await handled

    def post_soon(self, event: Event, admit: Callable[[], bool] = _always) -> None:
        """Hand over `event` without waiting: for sessions that end, which cannot wait."""
        self._inbox.put_nowait(_Posted(event, admit, None))

    async def run(self) -> None:
        """Own the core until cancelled; an error of the core ends the process with it."""
        ticker = asyncio.create_task(self._tick())
        try:
            while True:
                posted = await self._inbox.get()
                if posted.admit():
                    self._handle(posted.event, self._clock())
                if posted.handled is not None and not posted.handled.done():
                    posted.handled.set_result(None)
        finally:
            ticker.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            await self.post(Tick())

    def _handle(self, event: Event, now_ms: int) -> None:
        effects = self._core.handle(event, now_ms)
        for watcher in self.watchers:
            watcher.saw_event(event, now_ms)
        for effect in effects:
            for watcher in self.watchers:
                watcher.saw_effect(effect, now_ms)
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case ToRank(rank, message):
                if (outbox := self.rank_outboxes.get(rank)) is not None:
                    outbox.put(message)
            case ToGateway(gateway, message):
                if (outbox := self.gateway_outboxes.get(gateway)) is not None:
                    outbox.put(message)
            case ToLauncher(message):
                for outbox in self.launcher_outboxes:
                    outbox.put(message)
            case SwitchRecorded(record):
                self.on_switch(record)
            case Observed(line):
                self.on_observation(line)
            case ForecastMade():
                pass  # For those who watch.
            case Note(level, event, fields):
                say = log.warning if level is Level.WARNING else log.info
                say(event, **fields)
            case _:
                assert_never(effect)
