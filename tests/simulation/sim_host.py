"""The host of a simulated rank: the world's clock, and fibers that wait for it."""

import math
import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from coordinator.protocol.messages.rank import RankDown
from tests.simulation.fibers import Fiber, FiberEnded
from worker.io.session import HelloWanted

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank

TICK_MS = 10
CLOCK_START_MS = 100_000
"""The host's monotonic clock is so far ahead of the world's, which the coordinator goes by."""

IDLE_TICKS = 5
"""A wait in which nothing happens may take as long as this: hosts are never on time."""

COPY_TICKS = 0, 1, 3, 12
"""How long copies on a device take; the longest outlast a commit."""


class SimHost:
    """See `Host`; one process of one rank has it."""

    def __init__(self, process: "SimRank", body: Callable[[], None]) -> None:
        self._process = process
        self._world = process.world
        self.fiber = Fiber(body)
        self.pauses = 0
        """How often the process has waited."""
        self.threads: list[SimThread] = []
        """Its threads besides the main one: for copies, and for plans."""
        self._due = 0
        self._wakes: Callable[[], bool] | None = None

    def now_ns(self) -> int:
        """See `Host`, as all that follows."""
        return (self._world.now_ms + CLOCK_START_MS + self._process.clock_jump_ms) * 1_000_000

    def sleep(self, seconds: float) -> None:
        self.wait(None, seconds)

    def thread(self, name: str, begin: Callable[[], None] | None = None) -> Executor:
        self.threads.append(SimThread(self._process))
        return self.threads[-1]

    # ------------------------------------------------------------------ for the simulation

    def wait(self, wakes: Callable[[], bool] | None, seconds: float = math.inf) -> None:
        """Pause until the condition holds, or for so long, and to the next tick at least."""
        if self.fiber.is_ending:
            raise FiberEnded
        self.pauses += 1
        self._wakes = wakes
        self._due = self._world.now + ticks_of(seconds)
        self.fiber.pause()

    @property
    def is_due(self) -> bool:
        """Whether the process has what it waits for."""
        return self._world.now >= self._due or (self._wakes is not None and self._wakes())


def ticks_of(seconds: float) -> int:
    """Return the ticks that a wait takes, at least one."""
    return 1 << 40 if seconds == math.inf else max(1, math.ceil(seconds * 1_000 / TICK_MS))


class SimThread(Executor):
    """Runs calls in order: a start at once if nothing is before it, all others a little later."""

    def __init__(self, process: "SimRank") -> None:
        self._process = process
        self._calls: deque[tuple[int, Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor`."""
        if self._process.host.fiber.is_ending:
            raise FiberEnded
        future: Future[Any] = Future()
        is_start = bool(args)
        world = self._process.world
        last = self._calls[-1][0] if self._calls else 0
        due = max(last, world.now + world.rng.choice(COPY_TICKS))
        if is_start and not self._calls:
            due = world.now
        self._calls.append((due, future, lambda: fn(*args, **kwargs)))
        self.run_due()
        return future

    def run_due(self) -> None:
        """Run the calls whose time has come."""
        while self._calls and self._calls[0][0] <= self._process.world.now:
            _, future, call = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 -- it is raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(result)


class SimInbox(queue.SimpleQueue[RankDown | HelloWanted]):
    """What the coordinator has sent; to wait for it takes the world's time."""

    host: SimHost

    def get(self, block: bool = True, timeout: float | None = None) -> RankDown | HelloWanted:
        """See `queue.SimpleQueue`."""
        if self.empty() and timeout:
            self.host.wait(lambda: not self.empty(), timeout)
        return super().get(block=False)
