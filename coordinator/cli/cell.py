"""The running children of `aileron up`: started together, watched, stopped in order.

The worker launcher holds the model and every running task, so its end ends the run. The
coordinator and gateways lose no state that sessions do not repair, so they are restarted.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from coordinator.cli.children import Child
from coordinator.cli.errors import USAGE_STATUS
from coordinator.cli.restarts import Restarts
from coordinator.cli.screen import Screen

START_LIMIT_S = 3_600
"""A cell that does not serve after this long is stopped."""
PROBE_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class CellProcess:
    """A child, whether it is restarted when it dies, and how long its orderly end may take."""

    child: Child
    restarts: bool
    stop_limit_s: float


class Cell:
    """Runs `members`, which are in stop order."""

    def __init__(self, members: Sequence[CellProcess], screen: Screen) -> None:
        self._members = tuple(members)
        self._screen = screen
        self._stopping = False
        self._signals = 0
        self.reason = ""
        """Why the run failed, for the last line on the screen."""
        self.was_killed = False
        """Whether a second signal has killed the processes."""
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(
        self, serves: Callable[[], Awaitable[bool]], on_serving: Callable[[], None]
    ) -> int:
        """Run until a signal or a failure; returns the exit status.

        `serves` is polled until it returns True; then `on_serving` is called once.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup the terminal may disappear: SIGHUP is ignored already and stays so.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal)
        watchers = [asyncio.create_task(self._watch(member)) for member in self._members]
        announcer = asyncio.create_task(self._announce(serves, on_serving))
        try:
            return await self._ended
        finally:
            self._stopping = True
            announcer.cancel()
            await self._stop_all()
            for watcher in watchers:
                watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(announcer, *watchers, return_exceptions=True)

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._screen.say("stopping; press Ctrl-C again to kill all processes")
            self._end(0)
        else:
            self.was_killed = True
            self._screen.say("killed all processes; streams that were running are cut")
            for member in self._members:
                member.child.kill()

    def _end(self, status: int) -> None:
        self._stopping = True
        if not self._ended.done():
            self._ended.set_result(status)

    async def _watch(self, member: CellProcess) -> None:
        child = member.child
        restarts = Restarts()
        while True:
            started = time.monotonic()
            try:
                status = await child.run()
            except OSError as error:
                self.reason = f"{child.name} cannot be started: {error}"
                self._end(1)
                return
            if self._stopping:
                return
            again = member.restarts and status != USAGE_STATUS
            delay_s = restarts.delay_after(time.monotonic() - started) if again else None
            if delay_s is None:
                self._fail(child, status)
                return
            self._screen.say(
                f"{child.name} ended ({_words(status)}); starting it again in {delay_s:.1f} s"
            )
            await asyncio.sleep(delay_s)

    def _fail(self, child: Child, status: int) -> None:
        self.reason = child.reason
        if child.reason:
            self._screen.say(f"{child.name} ended ({_words(status)})")
        else:
            self.reason = f"{child.name} ended ({_words(status)}) and gave no reason."
            self._screen.say(f"{child.name} ended ({_words(status)}); its last lines were:")
            for line in child.tail:
                self._screen.say(f"    {line}")
        self._end(1)

    async def _announce(
        self, serves: Callable[[], Awaitable[bool]], on_serving: Callable[[], None]
    ) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not await serves():
            if time.monotonic() > deadline:
                self.reason = f"the cell does not serve after {START_LIMIT_S} s: see the logs."
                self._end(1)
                return
            await asyncio.sleep(PROBE_INTERVAL_S)
        on_serving()

    async def _stop_all(self) -> None:
        for member in self._members:
            if not await member.child.stop(member.stop_limit_s):
                self._screen.say(
                    f"{member.child.name} did not stop within {member.stop_limit_s:.0f} s "
                    "and was killed"
                )


def _words(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name
