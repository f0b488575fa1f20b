"""Records an aileron server's layout switches, by polling its admin API during the run.

Polls `GET /admin/switches` every `POLL_S`, as any operator could. A switch is dated by the first
poll that reports it, on the run's own clock, so at most about `POLL_S` late.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp

from loadgen.errors import UsageError

POLL_S = 0.25
ANSWER_TIMEOUT_S = 10.0
LAST_SWITCHES = 100
RECORD_FIELDS = (
    "epoch", "from", "to", "cause", "outcome", "gap_ms_max", "cut_over_ms", "reshard_ms", "total_ms"
)  # fmt: skip


class SwitchWatch:
    """The switches of one run; call `begin` before it, `watch` beside it, `end` after it."""

    def __init__(self, session: aiohttp.ClientSession, admin_url: str) -> None:
        self._session = session
        self._url = admin_url
        self._layout: str | None = None
        self._before: frozenset[int] = frozenset()
        self._events: dict[int, dict[str, Any]] = {}
        self._missed_polls = 0

    async def begin(self) -> None:
        """Read the layout and the earlier switches; raises `UsageError` without an answer."""
        try:
            layout = await self._get("/admin/layout")
            self._layout = str(layout["layout"])
            self._before = frozenset(int(each["epoch"]) for each in await self._switches())
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            reason = str(error) or type(error).__name__
            raise UsageError(
                f"--admin-url {self._url} does not answer as an admin API: {reason}."
            ) from error

    async def watch(self, clock: Callable[[], float]) -> None:
        """Poll until cancelled; `clock` gives seconds since the run began."""
        while True:
            await asyncio.sleep(POLL_S)
            await self._poll(clock)

    async def end(self, clock: Callable[[], float]) -> None:
        """Poll once more, for late measurements of the last switches."""
        await self._poll(clock)

    def as_json(self) -> dict[str, object]:
        """Return the layout at the start and every switch since, in order."""
        return {
            "poll_s": POLL_S,
            "layout_at_start": self._layout,
            "missed_polls": self._missed_polls,
            "events": [self._events[epoch] for epoch in sorted(self._events)],
        }

    async def _poll(self, clock: Callable[[], float]) -> None:
        asked_s = clock()
        try:
            switches = await self._switches()
            for each in switches:
                epoch = int(each["epoch"])
                if epoch not in self._before:
                    at_s = self._events.get(epoch, {}).get("at_s", round(asked_s, 3))
                    fields = {name: each.get(name) for name in RECORD_FIELDS}
                    self._events[epoch] = {"at_s": at_s, **fields}
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError):
            # A coordinator that restarts is part of the measurement; the report counts missed
            # polls.
            self._missed_polls += 1

    async def _switches(self) -> list[Any]:
        switches = (await self._get(f"/admin/switches?last={LAST_SWITCHES}"))["switches"]
        if not isinstance(switches, list):
            raise TypeError("its switches are no list")
        return switches

    async def _get(self, path: str) -> Any:
        async with (
            asyncio.timeout(ANSWER_TIMEOUT_S),
            self._session.get(self._url + path, allow_redirects=False) as response,
        ):
            text = await response.text(errors="replace")
            if response.status != 200:
                raise ValueError(f"status {response.status} for {path}")
            return json.loads(text)
