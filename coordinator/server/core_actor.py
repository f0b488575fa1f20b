"""The actor that owns the core: it passes in events one at a time and carries out the effects.

Invariant: a session becomes the one that effects reach in the same step in which the core handles
its opening, so no message decided for an earlier session reaches a later one. `post` waits until
the event is handled, so the inbox holds at most one such event per session and admin call.
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
from coordinator.protocol.messages.gateway import BatchProgress, GatewayFiles
from coordinator.server.outbox import Outbox

log = structlog.get_logger()


def monotonic_ms() -> int:
    """Milliseconds of this process's monotonic clock."""
    return time.monotonic_ns() // 1_000_000


def _always() -> bool:
    return True


class Watcher(Protocol):
    """Observes the core's events and effects, to measure; decides nothing."""

    def saw_event(self, event: Event, now_ms: int) -> None:
        """The core has handled an event."""

    def saw_effect(self, effect: Effect, now_ms: int) -> None:
        """The core has asked for an effect."""


class Decider(Protocol):
    """The part of the core that the actor needs."""

    def decide(self, event: Event, now_ms: int) -> list[Effect]:
        """Return the effects of `event` that ranks may wait for."""

    def publish(self, event: Event) -> list[Effect]:
        """Return the rest of its effects."""


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
        self._handling = asyncio.Lock()
        """Held from the decision of an event until all of its effects are published."""
        self.rank_outboxes: dict[Rank, Outbox] = {}
        self.gateway_outboxes: dict[str, Outbox] = {}
        self.launcher_outboxes: set[Outbox] = set()
        self.batches: dict[str, tuple[BatchProgress, ...]] = {}
        """The newest batches message of each gateway; the core does not use it."""
        self.gateway_files: dict[str, GatewayFiles] = {}
        """The newest such message of each gateway; the core does not use it."""
        self.on_switch: Callable[[SwitchRecord], None] = lambda _: None
        self.watchers: tuple[Watcher, ...] = ()
        self.on_observation: Callable[[Line], None] = lambda _: None

    async def post(self, event: Event, admit: Callable[[], bool] = _always) -> None:
        """Post `event` and wait until it is handled.

        `admit` is called in the same step, just before; if it returns False, the event is dropped.
        """
        handled = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Posted(event, admit, handled))
        await handled

    def post_soon(self, event: Event, admit: Callable[[], bool] = _always) -> None:
        """Post `event` without waiting: for sessions that end, which cannot wait."""
        self._inbox.put_nowait(_Posted(event, admit, None))

    async def settled(self) -> None:
        """Wait until all that was decided is published, such as the record of a switch."""
        async with self._handling:
            pass

    async def run(self) -> None:
        """Run the core until cancelled; an error of the core propagates and ends the process."""
        ticker = asyncio.create_task(self._tick())
        try:
            while True:
                posted = await self._inbox.get()
                try:
                    if posted.admit():
                        async with self._handling:
                            await self._handle(posted.event, self._clock())
                finally:
                    if posted.handled is not None and not posted.handled.done():
                        posted.handled.set_result(None)
        finally:
            ticker.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            await self.post(Tick())

    async def _handle(self, event: Event, now_ms: int) -> None:
        decided = self._core.decide(event, now_ms)
        for effect in decided:
            self._perform(effect)
        try:
            if any(isinstance(effect, ToRank) for effect in decided):
                await asyncio.sleep(0)  # Sessions write what ranks wait for; the rest takes long.
        finally:
            # Also if the process ends: no event is handled by half.
            published = self._core.publish(event)
            for effect in published:
                self._perform(effect)
            for watcher in self.watchers:
                watcher.saw_event(event, now_ms)
                for effect in (*decided, *published):
                    watcher.saw_effect(effect, now_ms)

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
                pass  # Only watchers use it.
            case Note(level, event, fields):
                say = log.warning if level is Level.WARNING else log.info
                say(event, **fields)
            case _:
                assert_never(effect)
