"""A CUDA rank's copies between its KV memory and host pages, beside its steps.

Stores follow the step that filled their blocks, loads go ahead of the step that reads theirs. The
device's copy engines do both, so steps neither wait for copies nor share their cores with them.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvadaptor.host.page_copies import PageCopies
from kvadaptor.transfer.boxes import Copying
from worker.rank.inflight_step import POLL_S

STORE_BACKLOG_BYTES = 2 << 30
"""Stores beyond that, 40 ms of the link, are left out: their blocks are not in host pages."""

WAIT_BYTES = 32 << 20
STORE_WAIT_S = 0.002
"""Tokens go out after the stores of at most `WAIT_BYTES`, or after this time.

Then a client has seen no block that the loss of the device would take. A prompt's stores are larger
than that and do not keep its first token waiting. After a wait that was not long enough, tokens do
not wait again before stores were over in time: a slow link would cost each step that wait.
"""

LOADS_UNDER_WAY = 512
LOADS_AT_ONCE = 128
"""Shares of loads ahead that are launched and not over, at most, and with one call.

A call of the driver that finds its queue full waits until copies end: 20 ms for 1 GB.
"""

PART_BYTES = 64 << 20
"""What one call copies of a load ahead, at most: 1.5 ms. A part is over as a whole, so that is how
exactly the time that a load still takes is known."""


class Launcher(Protocol):
    """Copies shares of host pages in one direction; `PageCopier` does."""

    def launch(self, copies: PageCopies, *, waits: bool = ...) -> Copying:
        """Copy after the copies before these; `waits`: and after all that the caller launched."""


@dataclass(frozen=True, slots=True)
class _Store:
    copying: Copying
    num_bytes: int
    done: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Load:
    """A load ahead: what is not launched of it, and the last copies that are."""

    rest: PageCopies
    copying: Copying | None = None

    def is_over(self) -> bool:
        return not self.rest.pages and (self.copying is None or self.copying.is_over())


@dataclass(frozen=True, slots=True)
class _Part:
    """A launched part of a load ahead."""

    copying: Copying
    shares: int
    num_bytes: int


class HostLanes:
    """The copies of one rank in both directions; all but `order_stores` is for its main loop."""

    def __init__(
        self,
        loads: Launcher,
        loads_ahead: Launcher,
        stores: Launcher,
        page_bytes: int,
        s_per_byte: float,
    ) -> None:
        """A load takes `s_per_byte`, in seconds."""
        self._loader, self._storer, self._page_bytes = loads, stores, page_bytes
        self._s_per_byte = s_per_byte
        self._ahead_loader = loads_ahead
        self._stores: deque[_Store] = deque()
        """Oldest first; they end in order."""
        self._store_bytes = 0
        self._is_late = False
        """Whether the last wait for stores was not long enough."""
        self._loads: dict[int, _Load] = {}
        """The loads ahead that no step follows yet, by number."""
        self._waiting: deque[_Load] = deque()
        """Those that are not launched to their end, oldest first."""
        self._under_way: deque[_Part] = deque()
        """Launched parts of them, oldest first."""
        self._under_way_shares = 0
        self._loads_wait = True
        """Whether the next load ahead waits for what the caller has launched."""
        self.late_blocks = 0
        """Blocks that were not stored because of the backlog."""

    # ------------------------------------------------------------------ stores

    def store(self, copies: PageCopies, done: Callable[[], None]) -> None:
        """Store blocks that are full after the steps launched before, and then call `done`.

        Stores nothing if too much is to be stored already.
        """
        self.look()
        num_bytes = self._bytes_of(copies)
        if self._stores and self._store_bytes + num_bytes > STORE_BACKLOG_BYTES:
            self.late_blocks += len(copies.pages)
            return
        self._stores.append(_Store(self._storer.launch(copies), num_bytes, done))
        self._store_bytes += num_bytes

    def look(self) -> None:
        """Call `done` of the stores that are over, and launch loads that have waited for others."""
        self._launch()
        while self._stores and self._stores[0].copying.is_over():
            store = self._stores.popleft()
            self._store_bytes -= store.num_bytes
            store.done()

    def wait_stores(self) -> None:
        """Wait until the few stores of the last step are over; see `WAIT_BYTES`."""
        if not self._has_stores():
            self._is_late = False
        elif self._store_bytes <= WAIT_BYTES and not self._is_late:
            _wait(lambda: not self._has_stores(), STORE_WAIT_S)
            self._is_late = bool(self._stores)

    def _has_stores(self) -> bool:
        self.look()
        return bool(self._stores)

    def order_stores(self) -> None:
        """Let the caller's later work, which writes to pages of the rank, wait for all stores.

        Any thread.
        """
        stores = tuple(self._stores)  # The main loop may add some meanwhile.
        if stores:
            stores[-1].copying.order()

    # ------------------------------------------------------------------ loads

    def load(self, copies: PageCopies) -> None:
        """Load blocks before the step that is launched next."""
        self._loader.launch(copies).order()

    def load_ahead(self, number: int, copies: PageCopies) -> None:
        """Load blocks that no step reads before `follow` was called with this number.

        No step that is launched touches them: vLLM gives blocks back after the last step that may,
        for connectors that write at once. The first load of a group waits for what other groups
        have launched; see `delay_loads` for stores.
        """
        self._loads[number] = load = _Load(copies)
        self._waiting.append(load)
        self._launch()

    def delay_loads(self) -> None:
        """Let loads ahead that come now wait for what the caller's next work waits for.

        A step that frees blocks of stores under way may leave some of them to loads of later steps.
        """
        self._loads_wait = True

    def _launch(self) -> None:
        """Launch loads ahead as far as the driver's queue has room."""
        while self._under_way and self._under_way[0].copying.is_over():
            self._under_way_shares -= self._under_way.popleft().shares
        while self._waiting and self._under_way_shares < LOADS_UNDER_WAY:
            load = self._waiting[0]
            share_bytes = self._page_bytes // load.rest.slots.count
            self._launch_part(load, min(LOADS_AT_ONCE, max(1, PART_BYTES // share_bytes)))
            if not load.rest.pages:
                self._waiting.popleft()

    def _launch_part(self, load: _Load, shares: int) -> None:
        part = load.rest.part(0, shares)
        load.rest = load.rest.part(shares, len(load.rest.pages))
        waits = load.copying is None and self._loads_wait
        load.copying = self._ahead_loader.launch(part, waits=waits)
        if waits:
            self._loads_wait = False  # Those after it follow it.
        self._under_way.append(_Part(load.copying, len(part.pages), self._bytes_of(part)))
        self._under_way_shares += len(part.pages)

    def _bytes_of(self, copies: PageCopies) -> int:
        return len(copies.pages) * self._page_bytes // copies.slots.count

    def is_over(self, number: int) -> bool:
        """Return whether a load ahead is over on this rank."""
        self._launch()
        load = self._loads.get(number)
        return load is not None and load.is_over()

    def remaining_s(self, number: int) -> float:
        """Return how long a load ahead will still take on this rank, in seconds.

        It is infinite until all of it is launched, as `follow` would have to wait for room.
        """
        self._launch()
        load = self._loads.get(number)
        if load is None or load.rest.pages:
            return math.inf
        remaining_bytes = 0
        for part in self._under_way:
            remaining_bytes += 0 if part.copying.is_over() else part.num_bytes
            if part.copying is load.copying:
                return remaining_bytes * self._s_per_byte
        return 0.0

    def follow(self, numbers: Iterable[int]) -> None:
        """Let the step that is launched next read what these loads brought."""
        for number in numbers:
            load = self._loads.pop(number)
            if load.rest.pages:
                # The leader has launched all of its own.
                self._launch_part(load, len(load.rest.pages))
                self._waiting.remove(load)
            if load.copying is not None:
                load.copying.order()

    def order_loads(self) -> None:
        """Let what the caller launches from now on wait for all loads ahead.

        The leader of the group may have given up some, and given their blocks to others.
        """
        for load in self._waiting:
            self._launch_part(load, len(load.rest.pages))
        self._waiting.clear()
        if self._under_way:
            self._under_way[-1].copying.order()  # They end in order.

    def wait_loads(self, limit_s: float) -> None:
        """Wait for all loads ahead, but not longer than that."""
        _wait(lambda: all(map(self.is_over, self._loads)), limit_s)

    # ------------------------------------------------------------------ both

    def stop(self) -> None:
        """Wait until nothing is copied: the rank leaves its group."""
        self._waiting.clear()
        self._loads.clear()
        self._loads_wait = True
        _wait(lambda: not (self._has_stores() or self._under_way))


def _wait(condition: Callable[[], bool], limit_s: float | None = None) -> None:
    end_s = time.monotonic() + limit_s if limit_s is not None else None
    while not condition() and (end_s is None or time.monotonic() < end_s):
        time.sleep(POLL_S)
