"""Runs one claimed batch from its status to its end, line by line, whatever fails meanwhile.

Carries out the steps of `next_step`. A line may run more than once, if a gateway dies or the server
is full; its result is stored once. While the disk is full, results wait in memory, no line begins,
and the run continues when there is room. Started and stopped by the batch service.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial

import structlog

from gateway.batches.content import Content, read_line_at, scan
from gateway.batches.lines import (
    LINE_BYTES_MAX,
    Line,
    Result,
    Survey,
    answered,
    read_line,
    split_results,
)
from gateway.batches.next_step import LineBook, Step, next_step
from gateway.batches.store import BatchStore, Claim, LeaseLostError, StorageError, StoreCalls
from gateway.batches.terms import (
    BatchRecord,
    FileRecord,
    LineError,
    Status,
    changed,
    ended,
    failed,
    validated,
)
from gateway.http.line_call import LineAnswer, LineCall

STORAGE_PAUSE_S_MIN = 0.5
STORAGE_PAUSE_S_MAX = 10.0
"""Longest pause before failed storage is tried again."""
LOOK_S = 1.0
"""Longest wait before a batch whose lines all wait checks the clock again."""
RESULTS_AT_ONCE = 256
"""Results that are read from the store at once when files are written."""

log = structlog.get_logger(__name__)


AnswerLine = Callable[[LineCall], Awaitable[LineAnswer]]


class BatchRun:
    """One batch that this gateway runs."""

    def __init__(
        self,
        claim: Claim,
        store: StoreCalls,
        content: Content,
        answer: AnswerLine,
        lines_at_once: Callable[[], int],
    ) -> None:
        self._claim = claim
        self._store = store
        self._content = content
        self._answer = answer
        self._lines_at_once = lines_at_once
        self._survey: Survey | None = None
        self._wake = asyncio.Event()

    @property
    def batch(self) -> BatchRecord:
        """The record as this gateway knows it."""
        return self._claim.batch

    @property
    def claim(self) -> Claim:
        """The claim with that record."""
        return self._claim

    def take_record(self, batch: BatchRecord) -> None:
        """Take the store's record; another process may have begun to cancel the batch."""
        if batch.status is not self.batch.status:
            self._claim = replace(self._claim, batch=batch)
            self._wake.set()

    async def run(self) -> None:
        """Run to the end; returns early if another gateway has the batch."""
        pause_s = STORAGE_PAUSE_S_MIN
        try:
            while (step := next_step(self.batch, time.time())) is not Step.NOTHING:
                try:
                    await self._do(step)
                except StorageError as error:
                    log.warning("batch_waits", batch=self.batch.id, reason=str(error))
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, STORAGE_PAUSE_S_MAX)
                else:
                    pause_s = STORAGE_PAUSE_S_MIN
        except LeaseLostError:
            log.warning("batch_lost", batch=self.batch.id)
            return
        counts = self.batch.counts
        log.info("batch_ended", batch=self.batch.id, status=self.batch.status, total=counts.total)

    async def _do(self, step: Step) -> None:
        match step:
            case Step.VALIDATE:
                await self._validate()
            case Step.RUN:
                await self._run_lines()
            case Step.CLOSE:
                await self._put(changed(self.batch, Status.FINALIZING, _now()))
            case Step.WRITE:
                files = await asyncio.to_thread(self._write_files)
                ids = [file.id if file else None for file in files]
                record = ended(self.batch, _now(), output_file_id=ids[0], error_file_id=ids[1])
                await self._put(record, tuple(file for file in files if file))

    async def _put(self, record: BatchRecord, files: tuple[FileRecord, ...] = ()) -> None:
        claim = self._claim
        try:
            await self._store.call(lambda store: store.put(claim, record, files))
        except LeaseLostError:
            # The batch may still be ours, and a client has begun to cancel it.
            batch = await self._store.call(lambda store: store.batch(record.tenant, record.id))
            if batch is None or batch.status is claim.batch.status:
                raise
            self.take_record(batch)
        else:
            self._claim = replace(claim, batch=record)

    async def _validate(self) -> None:
        survey = await asyncio.to_thread(self._look)
        batch = self.batch
        if survey.errors:
            await self._put(failed(batch, tuple(survey.errors), _now()))
        else:
            await self._put(validated(batch, len(survey.starts), survey.model, _now()))

    def _look(self) -> Survey:
        """Check the input file; called in a thread."""
        survey = Survey(self.batch.endpoint)

        def take(text: bytes, start: int) -> bool:
            survey.look(text, start)
            return not survey.is_full

        path = self._content.path(self.batch.input_file_id)
        if not path.exists():
            text = "The bytes of the input file are gone: upload it again."
            survey.errors.append(LineError(code="invalid_input_file", message=text))
            return survey
        scan(path, take, LINE_BYTES_MAX)
        survey.finish()
        self._survey = survey
        return survey

    async def _run_lines(self) -> None:
        """Run lines until all are recorded, the window is over, or the batch is cancelled."""
        if self._survey is None:
            # Another process began the batch.
            await asyncio.to_thread(self._look)
        batch_id = self.batch.id
        recorded = await self._store.call(lambda store: store.recorded(batch_id))
        book = LineBook(self.batch.counts.total, recorded)
        tasks: set[asyncio.Task[None]] = set()
        try:
            while next_step(self.batch, time.time()) is Step.RUN:
                self._wake.clear()
                for number in book.begin(time.time(), self._lines_at_once()):
                    task = asyncio.create_task(self._run_line(book, number))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                if results := book.answers():
                    await self._record(book, results)
                else:
                    await self._wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self) -> None:
        remaining_s = self.batch.expires_at - time.time()
        try:
            async with asyncio.timeout(min(LOOK_S, max(remaining_s, 0))):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _record(self, book: LineBook, results: tuple[Result, ...]) -> None:
        """Put results into the store; further results collect meanwhile."""
        claim, pause_s = self._claim, STORAGE_PAUSE_S_MIN
        while True:
            try:
                batch = await self._store.call(lambda store: store.record(claim, results))
            except StorageError as error:
                # Running lines go on meanwhile; `begin` counts unstored results against its limit.
                log.warning("batch_waits", batch=claim.batch.id, reason=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, STORAGE_PAUSE_S_MAX)
                continue
            book.recorded(results)
            self._claim = replace(claim, batch=batch)
            return

    async def _run_line(self, book: LineBook, number: int) -> None:
        """Run one line and record the outcome in `book`."""
        batch = self.batch
        try:
            line = await asyncio.to_thread(self._read_line, number)
            deadline_ms = max(round((batch.expires_at - time.time()) * 1_000), 1)
            call = LineCall(batch.endpoint, line.body, batch.tenant, deadline_ms, batch.key)
            answer = await self._answer(call)
        except StorageError as error:
            log.warning("line_waits", batch=batch.id, line=number, reason=str(error))
            book.refused(number, 503, time.time())
        else:
            if book.is_final(number, answer.status):
                result = answered(batch.id, line, answer.status, answer.request_id, answer.body)
                book.answered(result, answer.status)
            else:
                book.refused(number, answer.status, time.time(), answer.retry_after_s)
        self._wake.set()

    def _read_line(self, number: int) -> Line:
        assert self._survey is not None
        path = self._content.path(self.batch.input_file_id)
        text = read_line_at(path, self._survey.starts[number - 1], LINE_BYTES_MAX)
        return read_line(text, number, self.batch.endpoint)

    def _write_files(self) -> tuple[FileRecord | None, FileRecord | None]:
        """Write the output and the error file, in a thread; repeating it gives the same files."""
        batch = self.batch
        output, errors = self._content.begin(), self._content.begin()
        try:
            split = split_results(batch.id, batch.status, self._custom_ids(), self._results())
            for is_ok, text in split:
                (output if is_ok else errors).write(text + b"\n")
            records = []
            for part, what in ((output, "output"), (errors, "error")):
                record = _file_of(batch, what, part.bytes) if part.bytes else None
                if record is not None:
                    part.keep(record.id)
                records.append(record)
            return records[0], records[1]
        finally:
            output.drop()
            errors.drop()

    def _custom_ids(self) -> Iterator[tuple[int, str]]:
        survey = self._survey or self._look()
        # A batch that was cancelled before its validation has no lines yet.
        starts = survey.starts if self.batch.counts.total else ()
        for number, _ in enumerate(starts, 1):
            yield number, self._read_line(number).custom_id

    def _results(self) -> Iterator[Result]:
        batch_id, after = self.batch.id, 0
        while True:
            page = self._store.call_here(partial(_results_after, batch_id, after))
            yield from page
            if len(page) < RESULTS_AT_ONCE:
                return
            after = page[-1].number


def _results_after(batch_id: str, after: int, store: BatchStore) -> list[Result]:
    return store.results(batch_id, after, RESULTS_AT_ONCE)


def _file_of(batch: BatchRecord, what: str, size: int) -> FileRecord:
    """Return the record of a result file; its id follows from the batch's."""
    name = hashlib.sha256(f"{batch.id}/{what}".encode()).hexdigest()[:32]
    now_s = _now()
    return FileRecord(
        id=f"file-{name}",
        tenant=batch.tenant,
        filename=f"{batch.id}_{what}.jsonl",
        purpose="batch_output",
        bytes=size,
        created_at=now_s,
        expires_at=now_s + batch.files_expire_after_s,
    )


def _now() -> int:
    return int(time.time())
