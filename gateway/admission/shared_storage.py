"""Access to the Redis that gateways share: short waits, and a pause after each failure.

Rate limits and the idempotency cache use one `SharedStorage`, so if Redis fails for one of them,
the other does not wait for it either. Called by both.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from coordinator.protocol.gateway_config import REDIS_SCHEMES

STORAGE_WAIT_S = 0.04
"""Longest wait of one request for Redis, over all its calls."""

STORAGE_RETRY_S = 2.0
"""Pause after a failure of Redis. One more failure may follow just after Redis is back, which must
be in use again within 5 s."""

Result = TypeVar("Result")

log = structlog.get_logger(__name__)


class StorageAwayError(Exception):
    """Redis was not asked, or did not answer in time: go on without it."""


class WaitBudget:
    """Remaining time that one request may wait for Redis."""

    def __init__(self) -> None:
        self.remaining_s = STORAGE_WAIT_S


class SharedStorage:
    """An optional Redis, and whether it may be asked now."""

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.monotonic,
        away: Callable[[], None] = lambda: None,
    ) -> None:
        """`url` is `memory://` for none, or a Redis URL; raises ValueError for anything else.

        `away` is called each time Redis does not answer.
        """
        if url != "memory://" and not url.startswith(REDIS_SCHEMES):
            raise ValueError("gateway.rate_limit_storage: use memory:// or a redis:// URL.")
        self.url = url
        self._clock = clock
        self._away = away
        self._away_until_s = 0.0

    @property
    def is_shared(self) -> bool:
        """Whether a Redis is configured."""
        return self.url != "memory://"

    async def ask(self, work: Callable[[], Awaitable[Result]], budget: WaitBudget) -> Result:
        """Return Redis' answer to `work`; raises `StorageAwayError` within the budget."""
        if self._clock() < self._away_until_s:
            raise StorageAwayError
        loop_time = asyncio.get_running_loop().time
        began_s = loop_time()
        try:
            async with asyncio.timeout(budget.remaining_s):
                return await work()
        except Exception as error:
            # Requests go on whatever the driver raises.
            self._away()
            self._away_until_s = self._clock() + STORAGE_RETRY_S
            log.warning("shared_storage_away", reason=type(error).__name__, retry_s=STORAGE_RETRY_S)
            raise StorageAwayError from error
        finally:
            budget.remaining_s -= loop_time() - began_s
