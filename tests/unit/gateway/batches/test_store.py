"""What a store promises, on each store there is."""

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.batches import sqlite_store, terms
from gateway.batches.lines import Result
from gateway.batches.redis_store import RedisStore
from gateway.batches.sqlite_store import SqliteStore
from gateway.batches.store import (
    BatchStore,
    FileInUseError,
    LeaseLostError,
    PageWanted,
    StorageError,
    StorageFullError,
    TooManyError,
    UnknownFileError,
)
from gateway.batches.terms import (
    BatchRecord,
    FileRecord,
    NotAllowedError,
    Status,
    Usage,
    changed,
    ended,
    validated,
)
from tests.harness.redis.redis_server import IS_REAL, Redis


@pytest.fixture(params=["sqlite", "redis"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, fresh_redis: Redis
) -> Iterator[BatchStore]:
    made: BatchStore
    if request.param == "sqlite":
        made = SqliteStore(tmp_path / "data" / "batches.sqlite3")
    else:
        made = RedisStore(fresh_redis.url)
    yield made
    made.close()


def a_file(name: str = "1", tenant: str = "acme", **fields: Any) -> FileRecord:
    known = {"purpose": "batch", "bytes": 10, "created_at": 1, "expires_at": 1_000, **fields}
    return FileRecord(id=f"file-{name}", tenant=tenant, filename="in.jsonl", **known)


def a_batch(name: str = "1", tenant: str = "acme", file: str = "1") -> BatchRecord:
    return BatchRecord(
        id=f"batch_{name}",
        tenant=tenant,
        endpoint="/v1/completions",
        input_file_id=f"file-{file}",
        created_at=1,
        expires_at=100,
    )


def result(number: int, *, is_ok: bool = True) -> Result:
    return Result(number, f"line {number}".encode(), is_ok, Usage(1, 0, 2, 0))


def with_batch(store: BatchStore, name: str = "1", tenant: str = "acme") -> BatchRecord:
    store.add_file(a_file(name, tenant))
    store.add_batch(a_batch(name, tenant, name))
    return a_batch(name, tenant, name)


def test_a_tenant_sees_its_own(store: BatchStore) -> None:
    with_batch(store)
    assert store.file("acme", "file-1") == a_file()
    assert store.batch("acme", "batch_1") == a_batch()
    assert store.file("other", "file-1") is None
    assert store.batch("other", "batch_1") is None
    assert store.cancel("other", "batch_1", 5) is None
    assert not store.delete_file("other", "file-1")
    assert not store.files("other", PageWanted()).records
    assert not store.batches("other", PageWanted()).records
    with pytest.raises(UnknownFileError):
        store.add_batch(a_batch("2", "other"))


def test_pages(store: BatchStore) -> None:
    for number in range(5):
        store.add_file(a_file(str(number)))
        store.add_batch(a_batch(str(number), file=str(number)))
    store.add_file(a_file("x", purpose="batch_output"))
    page = store.files("acme", PageWanted(2, purpose="batch"))
    assert ([each.id for each in page.records], page.has_more) == (["file-4", "file-3"], True)
    page = store.files("acme", PageWanted(3, after="file-3", purpose="batch"))
    assert ([each.id for each in page.records], page.has_more) == (
        ["file-2", "file-1", "file-0"],
        False,
    )
    page = store.files("acme", PageWanted(1, after="file-1", oldest_first=True))
    assert ([each.id for each in page.records], page.has_more) == (["file-2"], True)
    batches = store.batches("acme", PageWanted(4))
    assert [each.id for each in batches.records] == [f"batch_{n}" for n in (4, 3, 2, 1)]
    assert batches.has_more
    assert not store.files("acme", PageWanted(after="file-none")).records


def test_files_are_deleted_unless_they_are_needed(store: BatchStore) -> None:
    with_batch(store)
    with pytest.raises(FileInUseError):
        store.delete_file("acme", "file-1")
    assert store.expired_files(10_000, 10) == []
    claim = store.claim("g", 1, 10)
    assert claim is not None
    store.put(claim, terms.failed(claim.batch, (), 2))
    assert store.expired_files(10_000, 10) == [a_file()]
    assert store.expired_files(999, 10) == []
    assert store.knows_file("file-1")
    assert store.delete_file("acme", "file-1")
    assert not store.delete_file("acme", "file-1")
    assert not store.knows_file("file-1")
    assert store.delete_old_batches(1) == 0
    assert store.delete_old_batches(2) == 1
    assert store.batch("acme", "batch_1") is None


def test_a_tenant_has_bounds(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "FILES_PER_TENANT_MAX", 2)
    monkeypatch.setattr(terms, "BYTES_PER_TENANT_MAX", 50)
    monkeypatch.setattr(terms, "BATCHES_UNFINISHED_MAX", 1)
    with_batch(store)
    with pytest.raises(TooManyError, match="1 unfinished"):
        store.add_batch(a_batch("2"))
    with pytest.raises(TooManyError, match="50 bytes"):
        store.add_file(a_file("2", bytes=41))
    store.add_file(a_file("2", bytes=40))
    with pytest.raises(TooManyError, match="2 files"):
        store.add_file(a_file("3", bytes=0))
    assert store.file("acme", "file-3") is None
    with_batch(store, "4", "other")
    assert store.delete_file("acme", "file-2")
    store.add_file(a_file("2", bytes=40))


def test_one_gateway_has_a_batch(store: BatchStore) -> None:
    with_batch(store)
    first = store.claim("one", 0, 10)
    assert first is not None
    assert store.claim("two", 9, 10) is None
    assert store.renew(first, 9, 10) == a_batch()
    assert store.claim("two", 18, 10) is None
    second = store.claim("two", 19, 10)
    assert second is not None
    assert second.fence > first.fence
    for call in (
        lambda: store.renew(first, 20, 10),
        lambda: store.record(first, [result(1)]),
        lambda: store.put(first, validated(first.batch, 1, "m", 3)),
    ):
        with pytest.raises(LeaseLostError):
            call()
    store.release(first)
    assert store.claim("three", 20, 10) is None, "only who has a batch can give it back"
    store.release(second)
    assert store.claim("three", 20, 10) is not None


def test_tenants_take_turns(store: BatchStore) -> None:
    for number in range(3):
        with_batch(store, f"a{number}")
    with_batch(store, "b", "other")
    order = []
    while (claim := store.claim("g", 0, 10)) is not None:
        order.append(claim.batch.id)
    assert order == ["batch_a0", "batch_b", "batch_a1", "batch_a2"]


def test_a_line_has_one_result(store: BatchStore) -> None:
    with_batch(store)
    claim = store.claim("g", 0, 10)
    assert claim is not None
    running = validated(claim.batch, 5, "m", 3)
    store.put(claim, running)
    store.record(claim, [result(4), result(2, is_ok=False)])
    batch = store.record(claim, [result(2), result(4), result(5)])
    assert (batch.counts.completed, batch.counts.failed) == (2, 1)
    assert batch.usage == Usage(3, 0, 6, 0)
    assert store.batch("acme", "batch_1") == batch
    assert store.recorded("batch_1") == [2, 4, 5]
    assert store.results("batch_1", 0, 2) == [result(2, is_ok=False), result(4)]
    assert store.results("batch_1", 4, 2) == [result(5)]
    assert store.recorded("batch_2") == []
    again = store.claim("h", 10, 10)
    assert again is not None
    assert again.batch == batch
    finalizing = changed(batch, Status.FINALIZING, 4)
    store.put(again, finalizing)
    assert store.record(again, [result(1)]) == finalizing, "it is too late for results"
    last = store.claim("h", 30, 10)
    assert last is not None
    output = a_file("out", purpose="batch_output")
    end = ended(last.batch, 5, output_file_id=output.id, error_file_id=None)
    store.put(last, end, [output])
    assert store.batch("acme", "batch_1") == end
    assert store.file("acme", "file-out") == output
    assert store.recorded("batch_1") == []
    assert store.claim("h", 99, 10) is None


def test_cancelling(store: BatchStore) -> None:
    with_batch(store)
    claim = store.claim("g", 0, 10)
    assert claim is not None
    cancelled = store.cancel("acme", "batch_1", 7)
    assert cancelled is not None
    assert cancelled.status is Status.CANCELLING
    assert store.cancel("acme", "batch_1", 8) == cancelled
    with pytest.raises(LeaseLostError):
        store.put(claim, validated(claim.batch, 1, "m", 8))
    assert store.renew(claim, 1, 10) == cancelled
    again = store.claim("g", 20, 10)
    assert again is not None
    end = ended(again.batch, 9, output_file_id=None, error_file_id=None)
    store.put(again, end)
    assert store.cancel("acme", "batch_1", 10) == end
    with_batch(store, "2")
    other = store.claim("g", 20, 10)
    assert other is not None
    store.put(other, terms.failed(other.batch, (), 2))
    with pytest.raises(NotAllowedError):
        store.cancel("acme", "batch_2", 10)


def test_nothing_is_lost_when_a_store_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "batches.sqlite3"
    store = SqliteStore(path)
    with_batch(store)
    claim = store.claim("g", 0, 10)
    assert claim is not None
    store.put(claim, validated(claim.batch, 2, "m", 3))
    store.record(claim, [result(1)])
    other = SqliteStore(path)
    store.close()
    assert other.recorded("batch_1") == [1]
    other.close()


def test_a_store_of_another_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "batches.sqlite3"
    SqliteStore(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StorageError, match="data_dir"):
        SqliteStore(path)


def test_a_full_database_takes_nothing_and_goes_on(tmp_path: Path) -> None:
    """SQLite's own bound on pages stands for a full disk: the same error, for real."""
    path = tmp_path / "batches.sqlite3"
    store = SqliteStore(path)
    with_batch(store)
    claim = store.claim("g", 0, 10)
    assert claim is not None
    store.put(claim, validated(claim.batch, 50, "m", 3))
    database: sqlite3.Connection = store._database
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    large = [Result(number, b"x" * 5_000, True) for number in range(1, 51)]
    with pytest.raises(StorageFullError):
        store.record(claim, large)
    assert store.recorded("batch_1") == []
    database.execute("PRAGMA max_page_count = 1000000")
    assert store.record(claim, large).counts.completed == 50
    store.close()


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(StorageError):
        SqliteStore(blocker / "batches.sqlite3")
    assert sqlite_store.SCHEMA_VERSION == 1


def test_a_redis_that_is_away() -> None:
    store = RedisStore("redis://127.0.0.1:1")
    with pytest.raises(StorageError):
        store.file("acme", "file-1")
    with pytest.raises(StorageError):
        store.add_file(a_file())
    store.close()


@pytest.mark.skipif(not IS_REAL, reason="only a real Redis can be full")
def test_a_redis_that_is_full_takes_nothing_and_goes_on(fresh_redis: Redis) -> None:
    store = RedisStore(fresh_redis.url)
    with_batch(store, "old")
    old = store.claim("g", 0, 10)
    assert old is not None
    store.put(old, terms.failed(old.batch, (), 2))
    with_batch(store)
    store.add_file(a_file("2"))
    claim = store.claim("g", 0, 10)
    assert claim is not None
    store.put(claim, validated(claim.batch, 50, "m", 3))
    before = fresh_redis.keys()
    fresh_redis.limit_memory("1")
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.add_file(a_file("3")),
        lambda: store.add_batch(a_batch("2", file="2")),
        lambda: store.record(claim, [result(1), result(2)]),
        lambda: store.renew(claim, 1, 10),
        lambda: store.cancel("acme", "batch_1", 5),
    )
    for call in calls:
        with pytest.raises(StorageFullError):
            call()
    assert fresh_redis.keys() == before, "nothing was written by halves"
    assert store.recorded("batch_1") == []
    assert store.file("acme", "file-2") == a_file("2"), "reading goes on"
    assert store.delete_file("acme", "file-2"), "what makes room goes on"
    assert store.delete_old_batches(2) == 1
    with pytest.raises(FileInUseError):
        store.delete_file(claim.batch.tenant, claim.batch.input_file_id)
    fresh_redis.limit_memory("0")
    assert store.record(claim, [result(1), result(2)]).counts.completed == 2
    store.add_file(a_file("3", bytes=terms.BYTES_PER_TENANT_MAX - 20))
    with pytest.raises(TooManyError, match="bytes"):
        store.add_file(a_file("4", bytes=1))
    store.close()


def test_two_claims_at_once_get_one_batch(fresh_redis: Redis) -> None:
    """The second one looked before the first one took it."""
    one, two = RedisStore(fresh_redis.url), RedisStore(fresh_redis.url)
    with_batch(one)
    look = two._claimable
    taken: list[Any] = []

    def look_and_be_late(now_s: float) -> str | None:
        found = look(now_s)
        if not taken:
            taken.append(one.claim("one", now_s, 10))
        return found

    two._claimable = look_and_be_late  # type: ignore[method-assign]
    assert two.claim("two", 0, 10) is None
    assert taken[0] is not None
    one.close()
    two.close()
