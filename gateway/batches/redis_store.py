"""The store in Redis, for gateways of several machines with a shared data folder.

Every change is a transaction that watches the keys it was decided from, so the same pure functions
make the next record as in the SQLite store. All keys share one slot of a cluster. Records are only
as durable as their Redis: use an append-only file. Called in one thread per process.
"""

from collections.abc import Sequence

import msgspec

from gateway.batches import terms
from gateway.batches.lines import Result, with_results
from gateway.batches.redis_link import Pipeline, RedisLink, key, read_record, translated
from gateway.batches.store import (
    Claim,
    FileInUseError,
    LeaseLostError,
    Page,
    PageWanted,
    TooManyError,
    UnknownFileError,
)
from gateway.batches.terms import BatchRecord, FileRecord, Status

OPEN_LOOK_MAX = 1_000
"""Most unfinished batches that a claim chooses from."""

DELETE_FILE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if redis.call('SCARD', KEYS[2]) > 0 then return -1 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[3], ARGV[2])
redis.call('ZREM', KEYS[4], ARGV[2])
redis.call('DECRBY', KEYS[5], ARGV[3])
return 1
"""
"""A script, because a full Redis refuses every transaction, even one that only deletes; it lets a
script continue after a delete."""


class RedisStore:
    """Stores everything in the Redis at `url`; raises ValueError for an invalid URL."""

    def __init__(self, url: str) -> None:
        self._link = RedisLink(url)

    def close(self) -> None:
        """Close the connections."""
        self._link.redis.close()

    def add_file(self, record: FileRecord) -> None:
        """Add a file."""
        files, size = key("files", record.tenant), key("bytes", record.tenant)

        def decide(pipe: Pipeline) -> None:
            count, total = pipe.zcard(files), int(pipe.get(size) or 0)
            if count >= terms.FILES_PER_TENANT_MAX:
                raise TooManyError(f"{terms.FILES_PER_TENANT_MAX} files")
            if total + record.bytes > terms.BYTES_PER_TENANT_MAX:
                raise TooManyError(f"{terms.BYTES_PER_TENANT_MAX} bytes in files")
            seq = self._link.next_number()
            pipe.multi()
            _write_file(pipe, record, seq)

        self._link.change(decide, files, size)

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return a tenant's file."""
        with translated():
            record = read_record(self._link.redis.get(key("file", file_id)), FileRecord)
        return record if record and record.tenant == tenant else None

    def files(self, tenant: str, wanted: PageWanted) -> Page[FileRecord]:
        """Return a page of a tenant's files."""

        def read(ids: list[bytes]) -> list[FileRecord | None]:
            found = self._link.redis.mget([key("file", each.decode()) for each in ids])
            return [read_record(each, FileRecord) for each in found]

        def fits(record: FileRecord) -> bool:
            return wanted.purpose in (None, record.purpose)

        return self._link.page(key("files", tenant), wanted, read, fits)

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a file's record."""
        name, users, size = key("file", file_id), key("users", file_id), key("bytes", tenant)
        with translated():
            text = self._link.redis.get(name)
            record = read_record(text, FileRecord)
            if record is None or record.tenant != tenant:
                return False
            keys = (name, users, key("files", tenant), key("files-by-end"), size)
            done = int(
                self._link.redis.eval(DELETE_FILE, len(keys), *keys, text, file_id, record.bytes)
            )
        if done < 0:
            raise FileInUseError
        return done > 0

    def knows_file(self, file_id: str) -> bool:
        """Return whether a file of any tenant has this id."""
        with translated():
            return bool(self._link.redis.exists(key("file", file_id)))

    def expired_files(self, now_s: int, limit: int) -> list[FileRecord]:
        """Return expired files that no unfinished batch needs."""
        with translated():
            old = self._link.redis.zrangebyscore(key("files-by-end"), "-inf", now_s, 0, limit)
            ids = [each.decode() for each in old]
            free = [each for each in ids if not self._link.redis.scard(key("users", each))]
            texts = self._link.redis.mget([key("file", each) for each in free]) if free else []
        found = [read_record(text, FileRecord) for text in texts]
        return [record for record in found if record is not None]

    def add_batch(self, record: BatchRecord) -> None:
        """Add a batch."""
        file = key("file", record.input_file_id)
        held = key("open", record.tenant)

        def decide(pipe: Pipeline) -> None:
            known = read_record(pipe.get(file), FileRecord)
            if known is None or known.tenant != record.tenant:
                raise UnknownFileError
            if pipe.scard(held) >= terms.BATCHES_UNFINISHED_MAX:
                raise TooManyError(f"{terms.BATCHES_UNFINISHED_MAX} unfinished batches")
            seq = self._link.next_number()
            pipe.multi()
            fields = {"record": msgspec.json.encode(record), "fence": 0, "leased_until": 0}
            pipe.hset(key("batch", record.id), mapping=fields)
            pipe.zadd(key("batches", record.tenant), {record.id: seq})
            pipe.zadd(key("batches-by-age"), {record.id: record.created_at})
            pipe.zadd(key("batches-open"), {record.id: seq})
            pipe.sadd(held, record.id)
            pipe.sadd(key("users", record.input_file_id), record.id)

        self._link.change(decide, file, held)

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Return a tenant's batch."""
        with translated():
            record = read_record(
                self._link.redis.hget(key("batch", batch_id), "record"), BatchRecord
            )
        return record if record and record.tenant == tenant else None

    def batches(self, tenant: str, wanted: PageWanted) -> Page[BatchRecord]:
        """Return a page of a tenant's batches."""

        def read(ids: list[bytes]) -> list[BatchRecord | None]:
            pipe = self._link.redis.pipeline(transaction=False)
            for each in ids:
                pipe.hget(key("batch", each.decode()), "record")
            return [read_record(each, BatchRecord) for each in pipe.execute()]

        return self._link.page(key("batches", tenant), wanted, read, lambda _: True)

    def cancel(self, tenant: str, batch_id: str, now_s: int) -> BatchRecord | None:
        """Begin to cancel a batch."""
        name = key("batch", batch_id)

        def decide(pipe: Pipeline) -> BatchRecord | None:
            before = read_record(pipe.hget(name, "record"), BatchRecord)
            if before is None or before.tenant != tenant:
                return None
            after = terms.cancelling(before, now_s)
            pipe.multi()
            _write_batch(pipe, after)
            return after

        return self._link.change(decide, name)

    def claim(self, owner: str, now_s: float, lease_s: float) -> Claim | None:
        """Claim an unfinished batch that no gateway holds."""
        while True:
            batch_id = self._claimable(now_s)
            if batch_id is None:
                return None
            claim = self._claim(batch_id, owner, now_s, lease_s)
            if claim is not None:
                return claim

    def _claimable(self, now_s: float) -> str | None:
        with translated():
            ids = self._link.redis.zrange(key("batches-open"), 0, OPEN_LOOK_MAX - 1)
            pipe = self._link.redis.pipeline(transaction=False)
            for each in ids:
                pipe.hmget(key("batch", each.decode()), "record", "leased_until")
            rows = pipe.execute()
        held: dict[str, int] = {}
        free: list[tuple[str, str]] = []
        for text, leased_until in rows:
            record = read_record(text, BatchRecord)
            if record is None:
                continue
            if float(leased_until) > now_s:
                held[record.tenant] = held.get(record.tenant, 0) + 1
            else:
                free.append((record.id, record.tenant))
        # `free` is in order of creation, and min returns the first of equals.
        return min(free, key=lambda each: held.get(each[1], 0), default=(None, ""))[0]

    def _claim(self, batch_id: str, owner: str, now_s: float, lease_s: float) -> Claim | None:
        name = key("batch", batch_id)

        def decide(pipe: Pipeline) -> Claim | None:
            text, fence, leased_until = pipe.hmget(name, "record", "fence", "leased_until")
            record = read_record(text, BatchRecord)
            if record is None or record.has_ended or float(leased_until) > now_s:
                return None
            claim = Claim(record, int(fence) + 1)
            pipe.multi()
            fields = {"fence": claim.fence, "owner": owner, "leased_until": now_s + lease_s}
            pipe.hset(name, mapping=fields)
            return claim

        return self._link.change(decide, name)

    def renew(self, claim: Claim, now_s: float, lease_s: float) -> BatchRecord:
        """Extend a claim and return the batch's record."""
        name = key("batch", claim.batch.id)

        def decide(pipe: Pipeline) -> BatchRecord:
            batch = _held(pipe, claim)
            pipe.multi()
            pipe.hset(name, "leased_until", str(now_s + lease_s))
            return batch

        return self._link.change(decide, name)

    def release(self, claim: Claim) -> None:
        """Give a batch up."""
        name = key("batch", claim.batch.id)

        def decide(pipe: Pipeline) -> None:
            try:
                _held(pipe, claim)
            except LeaseLostError:
                return
            pipe.multi()
            pipe.hset(name, mapping={"leased_until": 0, "owner": ""})

        self._link.change(decide, name)

    def record(self, claim: Claim, results: Sequence[Result]) -> BatchRecord:
        """Store and count results of lines."""
        name = key("batch", claim.batch.id)
        texts, order = key("results", claim.batch.id), key("lines", claim.batch.id)

        def decide(pipe: Pipeline) -> BatchRecord:
            batch = _held(pipe, claim)
            if batch.status is not Status.IN_PROGRESS or not results:
                return batch
            known = pipe.hmget(texts, [str(result.number) for result in results])
            new = [result for result, text in zip(results, known, strict=True) if text is None]
            batch = with_results(batch, new)
            pipe.multi()
            for result in new:
                pipe.hset(texts, str(result.number), msgspec.msgpack.encode(result))
                pipe.zadd(order, {str(result.number): result.number})
            _write_batch(pipe, batch)
            return batch

        # Only the holder writes results, so watching the batch is enough.
        return self._link.change(decide, name)

    def recorded(self, batch_id: str) -> list[int]:
        """Return the numbers of the lines that have a result."""
        with translated():
            return [int(each) for each in self._link.redis.zrange(key("lines", batch_id), 0, -1)]

    def results(self, batch_id: str, after: int, limit: int) -> list[Result]:
        """Return at most `limit` results of the lines after number `after`."""
        with translated():
            numbers = self._link.redis.zrangebyscore(
                key("lines", batch_id), f"({after}", "+inf", 0, limit
            )
            texts = self._link.redis.hmget(key("results", batch_id), numbers) if numbers else []
        return [msgspec.msgpack.decode(text, type=Result) for text in texts if text is not None]

    def put(self, claim: Claim, record: BatchRecord, files: Sequence[FileRecord] = ()) -> None:
        """Replace a batch's record by its next one and add its files."""

        def decide(pipe: Pipeline) -> None:
            if _held(pipe, claim).status is not claim.batch.status:
                raise LeaseLostError
            numbers = [self._link.next_number() for _ in files]
            pipe.multi()
            _write_batch(pipe, record)
            for file, seq in zip(files, numbers, strict=True):
                _write_file(pipe, file, seq)
            if record.has_ended:
                pipe.zrem(key("batches-open"), record.id)
                pipe.srem(key("open", record.tenant), record.id)
                pipe.srem(key("users", record.input_file_id), record.id)
                pipe.delete(key("results", record.id), key("lines", record.id))

        self._link.change(decide, key("batch", record.id))

    def delete_old_batches(self, ended_before_s: int) -> int:
        """Delete ended batches created before `ended_before_s`."""
        deleted = 0
        with translated():
            for each in self._link.redis.zrangebyscore(
                key("batches-by-age"), "-inf", f"({ended_before_s}"
            ):
                name = key("batch", each.decode())
                record = read_record(self._link.redis.hget(name, "record"), BatchRecord)
                if record is not None and not record.has_ended:
                    continue
                # Not a transaction, which a full Redis would refuse; an interrupted one is
                # repeated.
                if record is not None:
                    self._link.redis.zrem(key("batches", record.tenant), each)
                self._link.redis.delete(name)
                self._link.redis.zrem(key("batches-by-age"), each)
                deleted += 1
        return deleted


def _held(pipe: Pipeline, claim: Claim) -> BatchRecord:
    text, fence = pipe.hmget(key("batch", claim.batch.id), "record", "fence")
    record = read_record(text, BatchRecord)
    if record is None or int(fence) != claim.fence:
        raise LeaseLostError
    return record


def _write_batch(pipe: Pipeline, record: BatchRecord) -> None:
    pipe.hset(key("batch", record.id), "record", msgspec.json.encode(record))


def _write_file(pipe: Pipeline, record: FileRecord, seq: int) -> None:
    pipe.set(key("file", record.id), msgspec.json.encode(record))
    pipe.zadd(key("files", record.tenant), {record.id: seq})
    pipe.zadd(key("files-by-end"), {record.id: record.expires_at})
    pipe.incrby(key("bytes", record.tenant), record.bytes)
