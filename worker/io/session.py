"""A rank's gRPC session with its coordinator: the heartbeat, on a thread of its own.

Reports go up on an interval and on every change; directives and tasks come down into the main
loop's inbox. A broken session is reopened with a fresh `RankHello`; unsent events are sent after
it. Heartbeats continue while a long step runs.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import structlog

from coordinator.protocol.cell_tls import CellTls
from coordinator.protocol.messages.rank import LinkCut, RankDown, RankHello, RankUp, Report
from coordinator.protocol.wire import (
    RANK_PATH,
    TOKEN_METADATA_KEY,
    decode_rank_down,
    encode,
)
from worker.io.channel import open_channel

log = structlog.get_logger()

END = grpc.aio.EOF  # type: ignore[attr-defined]
RECONNECT_S = 0.2
"""Pause between two attempts to reach the coordinator."""


@dataclass(frozen=True, slots=True)
class HelloWanted:
    """Put into the inbox when a session opens: the main loop answers with `RankSession.hello`."""


Inbox = queue.SimpleQueue[RankDown | HelloWanted]


def now_ms() -> int:
    """Milliseconds of this process' monotonic clock."""
    return time.monotonic_ns() // 1_000_000


def merge_reports(older: Report | None, newer: Report) -> Report:
    """Return the newer state with the events of both."""
    if older is None:
        return newer
    return msgspec.structs.replace(
        newer,
        ended=older.ended + newer.ended,
        returned=older.returned + newer.returned,
        cached=older.cached + newer.cached,
        times=older.times + newer.times,
    )


class RankSession:
    """Keeps one session open; `publish` and `hello` may be called from the main loop."""

    def __init__(
        self,
        target: str,
        token: str,
        heartbeat_s: float,
        silence_s: float,
        inbox: Inbox,
        overhear: Callable[[RankDown], None],
        tls: CellTls | None = None,
    ) -> None:
        """Report every `heartbeat_s`; give up a session that is silent for `silence_s`.

        `overhear` runs in the session's thread, for messages that the main loop may be too busy
        for.
        """
        self._target = target
        self._tls = tls
        self._token = token
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._inbox = inbox
        self._overhear = overhear
        self._lock = threading.Lock()
        self._latest: Report | None = None
        self._links: tuple[LinkCut, ...] = ()
        self._changed = False
        self._hello: RankHello | None = None
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="session", daemon=True)

    def start(self) -> None:
        """Start connecting."""
        self._thread.start()

    def publish(self, report: Report) -> None:
        """Send this report as soon as possible; events of unsent ones are merged into it."""
        with self._lock:
            self._latest = merge_reports(self._latest, report)
            self._changed = True
        self._loop.call_soon_threadsafe(self._wake.set)

    def tell_links(self, links: tuple[LinkCut, ...]) -> None:
        """Send these broken links with all reports from now on; send the first one at once."""
        with self._lock:
            self._links = links
            self._changed = True
        self._loop.call_soon_threadsafe(self._wake.set)

    def hello(self, hello: RankHello) -> None:
        """Answer `HelloWanted`."""
        with self._lock:
            self._hello = hello
        self._loop.call_soon_threadsafe(self._wake.set)

    def close(self) -> None:
        """End the session and its thread."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._wake.set)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._keep_open())

    async def _keep_open(self) -> None:
        while not self._closing:
            try:
                await self._one_session()
            except grpc.aio.AioRpcError as error:
                refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
                log.warning(
                    "session_lost",
                    code=error.code().name,
                    detail=error.details(),
                    advice="start all processes with one AILERON_TOKEN" if refused else "retrying",
                )
            if not self._closing:
                await asyncio.sleep(RECONNECT_S)

    async def _one_session(self) -> None:
        async with open_channel(self._target, self._tls) as channel:
            method = channel.stream_stream(
                RANK_PATH, request_serializer=encode, response_deserializer=decode_rank_down
            )
            self._hello = None
            self._inbox.put(HelloWanted())
            call = method(self._reports(), metadata=((TOKEN_METADATA_KEY, self._token),))
            while (message := await self._heard(call)) is not None:
                self._overhear(message)
                self._inbox.put(message)

    async def _heard(self, call: Any) -> RankDown | None:
        """Return the next message; None at the end of the session or if it is half open.

        The coordinator answers each due report. Without answers this side's reports may still
        arrive: the rank stops when its lease ends, but the coordinator would count it as serving.
        Time in which this process itself was stopped does not count as silence.
        """
        read = asyncio.ensure_future(call.read())
        silent_s = 0.0
        while silent_s < self._silence_s:
            done, _ = await asyncio.wait([read], timeout=self._heartbeat_s)
            if done:
                message = read.result()
                return None if message is END else message
            if self._hello is not None:
                silent_s += self._heartbeat_s
        read.cancel()
        log.warning(
            "session_silent", seconds=self._silence_s, advice="the rank opens another session"
        )
        return None

    async def _reports(self) -> AsyncIterator[RankUp]:
        while self._hello is None and not self._closing:
            await self._woken()
        if self._hello is not None:
            yield self._hello
        while not self._closing:
            report = self._take()
            if report is not None:
                yield report
            await self._woken()

    def _take(self) -> Report | None:
        """Return the latest report; its events are taken out so that they are sent once."""
        with self._lock:
            report = self._latest
            if report is None:
                return None
            nothing: dict[str, Any] = dict.fromkeys(("ended", "returned", "times", "cached"), ())
            self._latest = msgspec.structs.replace(report, **nothing)
            self._changed = False
            return msgspec.structs.replace(report, sent_at_ms=now_ms(), links=self._links)

    async def _woken(self) -> None:
        if not self._changed:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it may swallow a cancellation.
                async with asyncio.timeout(self._heartbeat_s):
                    await self._wake.wait()
        self._wake.clear()
