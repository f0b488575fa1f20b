"""The gateway's batch service: claims batches, runs them, and deletes what has expired.

Called by the process; one per gateway. Any number of gateways may share a store.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from coordinator.protocol.messages.gateway import BatchProgress
from gateway.batches.content import Content
from gateway.batches.runner import AnswerLine, BatchRun
from gateway.batches.store import Claim, FileInUseError, LeaseLostError, StorageError, StoreCalls
from gateway.batches.terms import RETENTION_S, BatchRecord

RUNS_MAX = 8
"""Most batches that one gateway runs at once."""
LOOK_S = 1.0
"""Interval of checks for new batches, and for cancelled ones."""
SWEEP_S = 600.0
SWEEP_FILES = 100
"""Most files that are deleted in one sweep."""
CLOSE_WAIT_S = 5.0
"""Longest time for releasing batches at the end."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BatchServiceSettings:
    """See `BatchesConfig`."""

    lines_at_once: int = 64
    lease_s: float = 15.0


class BatchService:
    """The batches that this gateway runs."""

    def __init__(
        self,
        owner: str,
        store: StoreCalls,
        content: Content,
        answer: AnswerLine,
        settings: BatchServiceSettings,
    ) -> None:
        self._owner = owner
        self._store = store
        self._content = content
        self._answer = answer
        self._settings = settings
        self._runs: dict[asyncio.Task[None], BatchRun] = {}
        self._wake = asyncio.Event()
        self._swept_at_s = 0.0
        self._is_closed = False
        self._trouble = ""

    def poke(self) -> None:
        """Check now: a client has made or cancelled a batch."""
        self._wake.set()

    def progress(self) -> tuple[BatchProgress, ...]:
        """Return the progress of the batches that run here."""
        batches = [run.batch for run in self._runs.values()]
        return tuple(
            BatchProgress(
                batch=each.id,
                status=each.status.value,
                total=each.counts.total,
                completed=each.counts.completed,
                failed=each.counts.failed,
            )
            for each in batches
        )

    async def run(
        self,
        is_ready: Callable[[], bool],
        publish: Callable[[Sequence[BatchProgress]], None],
    ) -> None:
        """Work until cancelled; claim new batches only while requests can be served."""
        while True:
            try:
                if self._trouble:
                    # The rest may not ask the store at all: that would not show that it works.
                    await self._is_known("")
                await self._keep()
                await self._sweep()
                while is_ready() and not self._is_closed and len(self._runs) < RUNS_MAX:
                    if not await self._take():
                        break
                self._note_trouble("")
            except StorageError as error:
                self._note_trouble(str(error))
            publish(self.progress())
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            self._wake.clear()

    async def close(self) -> None:
        """Release all batches, so that other gateways continue them immediately."""
        self._is_closed = True
        runs = dict(self._runs)
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        with suppress(TimeoutError, StorageError):
            async with asyncio.timeout(CLOSE_WAIT_S):
                for run in runs.values():
                    await self._release(run.claim)

    async def _release(self, claim: Claim) -> None:
        await self._store.call(lambda store: store.release(claim))

    async def _renew(self, claim: Claim) -> BatchRecord:
        now_s, lease_s = time.time(), self._settings.lease_s
        return await self._store.call(lambda store: store.renew(claim, now_s, lease_s))

    async def _take(self) -> bool:
        now_s, lease_s = time.time(), self._settings.lease_s
        claim = await self._store.call(lambda store: store.claim(self._owner, now_s, lease_s))
        if claim is None:
            return False
        log.info("batch_taken", batch=claim.batch.id, status=claim.batch.status)
        run = BatchRun(claim, self._store, self._content, self._answer, self._share)
        task = asyncio.create_task(run.run())
        self._runs[task] = run
        task.add_done_callback(self._ended)
        return True

    def _share(self) -> int:
        return max(self._settings.lines_at_once // max(len(self._runs), 1), 1)

    def _ended(self, task: asyncio.Task[None]) -> None:
        run = self._runs.pop(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            # Its lease expires, and the next gateway to claim it tries again.
            log.error("batch_broken", batch=run.batch.id, exc_info=bug)
        self._wake.set()

    async def _keep(self) -> None:
        """Renew the claims, and notice batches that are being cancelled."""
        for task, run in list(self._runs.items()):
            claim = run.claim
            try:
                batch = await self._renew(claim)
            except LeaseLostError:
                log.warning("batch_lost", batch=claim.batch.id)
                task.cancel()
            else:
                if run.claim is claim:
                    run.take_record(batch)

    async def _sweep(self) -> None:
        """Delete expired files, old batches, and files that a crash left without a record."""
        now_s = time.time()
        if now_s - self._swept_at_s < SWEEP_S:
            return
        self._swept_at_s = now_s
        old = await self._store.call(lambda store: store.expired_files(int(now_s), SWEEP_FILES))
        for file in old:
            await self._delete(file.tenant, file.id)
        await self._store.call(lambda store: store.delete_old_batches(int(now_s) - RETENTION_S))
        for name in await asyncio.to_thread(lambda: list(self._content.abandoned(now_s))):
            if not await self._is_known(name):
                await asyncio.to_thread(self._content.delete, name)

    async def _delete(self, tenant: str, file_id: str) -> None:
        try:
            await self._store.call(lambda store: store.delete_file(tenant, file_id))
        except FileInUseError:
            # A client has just made a batch of it: a later sweep deletes it.
            return
        await asyncio.to_thread(self._content.delete, file_id)

    async def _is_known(self, file_id: str) -> bool:
        return await self._store.call(lambda store: store.knows_file(file_id))

    def _note_trouble(self, reason: str) -> None:
        if reason != self._trouble:
            log.warning("batch_storage", reason=reason or "works again.")
        self._trouble = reason
