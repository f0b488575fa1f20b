"""A batch from its file to its files, with answers, refusals and disks made by the test."""

import asyncio
import errno
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import IO, Any, cast

import pytest

from gateway.batches.content import Content, Part
from gateway.batches.service import BatchService, BatchServiceSettings
from gateway.batches.sqlite_store import SqliteStore
from gateway.batches.store import StorageFullError, StoreCalls
from gateway.batches.terms import BatchRecord, Counts, FileRecord, Status
from gateway.http.line_call import LineAnswer, LineCall

URL = "/v1/completions"
LIMIT_S = 60.0
Answer = Callable[[LineCall], Awaitable[LineAnswer]]


class Office:
    """A desk over a folder, and a client's view of it."""

    def __init__(self, folder: Path, answer: Answer, **settings: Any) -> None:
        self.path = folder / "batches.sqlite3"
        self.store = StoreCalls(lambda: SqliteStore(self.path))
        self.content = Content(folder / "files")
        settings = {"lines_at_once": 4, "lease_s": 30.0, **settings}
        self.desk = BatchService(
            "g", self.store, self.content, answer, BatchServiceSettings(**settings)
        )
        self.work = asyncio.create_task(self.desk.run(lambda: True, lambda _: None))

    async def batch(
        self, *lines: Any, expires_in_s: float = 86_400, name: str = "1"
    ) -> BatchRecord:
        """Make a batch of these lines; a text is the prompt of a good one."""
        texts = [
            line
            if isinstance(line, bytes)
            else json.dumps(
                {
                    "custom_id": f"c{number}",
                    "method": "POST",
                    "url": URL,
                    "body": {"model": "m", "prompt": line},
                }
            ).encode()
            for number, line in enumerate(lines, 1)
        ]
        part = self.content.begin()
        part.write(b"\n".join(texts))
        file_id = f"file-{name:0>24}"
        part.keep(file_id)
        now_s = int(time.time())
        file = FileRecord(
            id=file_id,
            tenant="acme",
            filename="in.jsonl",
            purpose="batch",
            bytes=part.bytes,
            created_at=now_s,
            expires_at=now_s + 10_000,
        )
        record = BatchRecord(
            id=f"batch_{name}",
            tenant="acme",
            endpoint=URL,
            input_file_id=file_id,
            created_at=now_s,
            expires_at=int(now_s + expires_in_s),
        )
        await self.store.call(lambda store: store.add_file(file))
        await self.store.call(lambda store: store.add_batch(record))
        self.desk.poke()
        return record

    async def now(self, batch: BatchRecord) -> BatchRecord:
        found = await self.store.call(lambda store: store.batch(batch.tenant, batch.id))
        assert found is not None
        return found

    async def until(
        self, batch: BatchRecord, condition: Callable[[BatchRecord], bool]
    ) -> BatchRecord:
        deadline = time.monotonic() + LIMIT_S
        while not condition(now := await self.now(batch)):
            assert time.monotonic() < deadline, now
            await asyncio.sleep(0.01)
        return now

    async def ended(self, batch: BatchRecord) -> BatchRecord:
        return await self.until(batch, lambda now: now.has_ended)

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        text = self.content.path(file_id).read_text()
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    async def close(self) -> None:
        self.work.cancel()
        await asyncio.gather(self.work, return_exceptions=True)
        await self.desk.close()
        await self.store.close()


async def answer_at_once(call: LineCall) -> LineAnswer:
    assert (call.path, call.tenant) == (URL, "acme")
    return LineAnswer(200, call.body, "r")


Opened = Callable[..., Office]


@pytest.fixture
async def offices(tmp_path: Path) -> AsyncIterator[Opened]:
    made: list[Office] = []

    def open_office(answer: Answer = answer_at_once, **settings: Any) -> Office:
        made.append(Office(tmp_path, answer, **settings))
        return made[-1]

    yield open_office
    for office in made:
        await office.close()


async def test_a_batch_is_run(offices: Opened) -> None:
    running = most = 0

    async def answer(call: LineCall) -> LineAnswer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return LineAnswer(400 if b"bad" in call.body else 200, b'{"usage":null}', "r")

    office = offices(answer)
    batch = await office.batch(*(["fine"] * 40 + ["bad"] + ["fine"] * 9))
    end = await office.ended(batch)
    assert end.status is Status.COMPLETED
    assert end.counts == Counts(50, 49, 1)
    assert [line["custom_id"] for line in office.lines(end.error_file_id)] == ["c41"]
    ids = [line["custom_id"] for line in office.lines(end.output_file_id)]
    assert ids == [f"c{number}" for number in range(1, 51) if number != 41]
    assert 1 < most <= 4
    assert list(end.times) == ["in_progress", "finalizing", "completed"]
    assert not list(office.content.path("file-" + "0" * 24).parent.glob("*.part"))


async def test_a_bad_file_fails_the_batch(offices: Opened) -> None:
    office = offices()
    end = await office.ended(await office.batch("fine", b"{", b"{}"))
    assert end.status is Status.FAILED
    assert [(error.line, error.code) for error in end.errors] == [
        (2, "invalid_json_line"),
        (3, "missing_required_parameter"),
    ]
    assert end.view()["errors"]["data"][0]["line"] == 2
    assert end.output_file_id is None


MARK = b"\xef\xbb\xbf"


async def test_a_byte_order_mark_is_skipped(offices: Opened) -> None:
    """As editors on Windows write it, with their line ends; a mark anywhere else is no JSON."""
    office = offices()
    fields = {"method": "POST", "url": URL, "body": {"model": "m", "prompt": "p"}}
    one, two = (json.dumps({"custom_id": name, **fields}).encode() for name in ("c1", "c2"))
    end = await office.ended(await office.batch(MARK + one + b"\r", two + b"\r", b""))
    assert end.status is Status.COMPLETED
    assert end.counts == Counts(2, 2, 0)
    assert [line["custom_id"] for line in office.lines(end.output_file_id)] == ["c1", "c2"]
    end = await office.ended(await office.batch(MARK + one, MARK + two, name="2"))
    assert [(error.line, error.code) for error in end.errors] == [(2, "invalid_json_line")]
    end = await office.ended(await office.batch(MARK, name="3"))
    assert [error.code for error in end.errors] == ["empty_file"]


async def test_refused_lines_are_tried_again(offices: Opened) -> None:
    """A full server is waited for as long as it takes, errors of its own thrice."""
    tries: dict[bytes, int] = {}

    async def answer(call: LineCall) -> LineAnswer:
        tries[call.body] = tries.get(call.body, 0) + 1
        if b"full" in call.body:
            return LineAnswer(200 if tries[call.body] > 2 else 429, b"{}", "r")
        return LineAnswer(500 if b"broken" in call.body else 200, b"{}", "r")

    office = offices(answer, lines_at_once=8)
    end = await office.ended(await office.batch("full", "broken", "fine"))
    assert end.counts == Counts(3, 2, 1)
    assert sorted(tries.values()) == [1, 3, 3]


async def hang(call: LineCall) -> LineAnswer:
    if b"hang" in call.body:
        await asyncio.Event().wait()
    return LineAnswer(200, b"{}", "r")


async def test_what_is_over_expires(offices: Opened) -> None:
    office = offices(hang)
    end = await office.ended(await office.batch("fine", "hang", "fine", expires_in_s=3))
    assert end.status is Status.EXPIRED
    assert end.expires_at <= end.times["expired"]
    errors = office.lines(end.error_file_id)
    done = [line["custom_id"] for line in office.lines(end.output_file_id)]
    expired = [line["custom_id"] for line in errors]
    assert "c2" in expired
    assert sorted(done + expired) == ["c1", "c2", "c3"]
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}


async def test_a_cancelled_batch_ends_with_what_it_has(offices: Opened) -> None:
    office = offices(hang)
    batch = await office.batch("fine", "hang", "hang")
    await office.until(batch, lambda now: now.counts.completed == 1)
    await office.store.call(lambda store: store.cancel("acme", batch.id, 7))
    office.desk.poke()
    end = await office.ended(batch)
    assert end.status is Status.CANCELLED
    assert end.counts == Counts(3, 1, 2)
    assert [line["custom_id"] for line in office.lines(end.output_file_id)] == ["c1"]
    assert {line["error"]["code"] for line in office.lines(end.error_file_id)} == {
        "batch_cancelled"
    }


async def test_a_batch_that_is_cancelled_before_it_begins(offices: Opened) -> None:
    office = offices()
    office.work.cancel()
    batch = await office.batch("fine")
    await office.store.call(lambda store: store.cancel("acme", batch.id, 7))
    end = await offices().ended(batch)
    assert end.status is Status.CANCELLED
    assert end.output_file_id is end.error_file_id is None


async def test_another_desk_goes_on_where_one_stopped(offices: Opened) -> None:
    first = offices(hang)
    batch = await first.batch("fine", "hang", "fine")
    await first.until(batch, lambda now: now.counts.completed == 2)
    await first.desk.close()
    asked: list[LineCall] = []

    async def answer(call: LineCall) -> LineAnswer:
        asked.append(call)
        return LineAnswer(200, b"{}", "r")

    second = offices(answer)
    end = await second.ended(batch)
    assert end.counts == Counts(3, 3, 0)
    assert len(asked) == 1, "what has a result is not run again"


async def test_who_has_lost_a_batch_stops(offices: Opened) -> None:
    """A gateway that was frozen for longer than its lease finds another one at work."""
    first = offices(hang, lease_s=0.1)
    batch = await first.batch("hang")
    await first.until(batch, lambda now: now.status is Status.IN_PROGRESS)
    first.work.cancel()
    await asyncio.sleep(0.2)
    second = offices(answer_at_once)
    end = await second.ended(batch)
    assert end.status is Status.COMPLETED
    again = asyncio.create_task(first.desk.run(lambda: False, lambda _: None))
    deadline = time.monotonic() + LIMIT_S
    while first.desk.progress():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    again.cancel()
    assert await second.now(batch) == end


async def test_a_full_disk_is_waited_for(offices: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the store is full, then the folder; nothing torn is left and nothing runs twice."""
    full = {"store", "files"}
    met: list[str] = []
    record, write = SqliteStore.record, Part.write

    def record_if_room(self: SqliteStore, *args: Any) -> BatchRecord:
        if "store" in full:
            met.append("store")
            raise StorageFullError("full.")
        return record(self, *args)

    def write_if_room(self: Part, data: bytes) -> None:
        if "files" in full and b"response" in data:
            met.append("files")
            self._file = cast(IO[bytes], _Full(self._file))
        write(self, data)

    monkeypatch.setattr(SqliteStore, "record", record_if_room)
    monkeypatch.setattr(Part, "write", write_if_room)
    asked: list[LineCall] = []

    async def answer(call: LineCall) -> LineAnswer:
        asked.append(call)
        return LineAnswer(200, b"{}", "r")

    office = offices(answer)
    batch = await office.batch(*["fine"] * 20)
    await office.until(batch, lambda _: "store" in met)
    assert len(asked) <= 4, "nothing begins whose result has no room"
    full.remove("store")
    await office.until(batch, lambda _: "files" in met)
    assert (await office.now(batch)).status is Status.FINALIZING
    full.remove("files")
    end = await office.ended(batch)
    assert end.counts == Counts(20, 20, 0)
    assert len(asked) == 20
    folder = office.content.path("file-" + "0" * 24).parent
    assert len(list(folder.iterdir())) == 2, "the input and the output"


class _Full:
    """A file on a full disk."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, _: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


async def test_what_is_old_is_swept_away(offices: Opened, tmp_path: Path) -> None:
    office = offices()
    office.work.cancel()
    await office.batch("fine")
    folder = tmp_path / "files"
    past = {"part": folder / "x.part", "lost": folder / ("file-" + "f" * 24)}
    for path in past.values():
        path.write_text("x")
        os.utime(path, (1, 1))
    (folder / ("file-" + "e" * 24)).write_text("an upload that has no record yet")
    office = offices()
    deadline = time.monotonic() + LIMIT_S
    while any(path.exists() for path in past.values()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert (folder / ("file-" + "e" * 24)).exists()
    assert (folder / f"file-{1:0>24}").exists()
