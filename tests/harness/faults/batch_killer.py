"""Runs batches in processes that are killed, again and again, and tells what became of them.

`tests.harness.faults.batch_killer FOLDER KILLS SEED` forks one worker after the other, each with
the product's runner over the product's store, and kills each at a random moment, until so many
were killed; then it lets one finish. Forking spares the imports. Prints one line of JSON.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from gateway.batches.content import Content
from gateway.batches.runner import BatchRun
from gateway.batches.sqlite_store import SqliteStore
from gateway.batches.store import StoreCalls
from gateway.batches.terms import BatchRecord, FileRecord
from gateway.http.line_call import LineAnswer, LineCall

URL = "/v1/completions"
TENANT = "acme"
LINES_MAX = 60
LIFE_S_MIN = 0.02
LIFE_S_MAX = 5.0


def make_batch(store: SqliteStore, content: Content, name: int, lines: int) -> None:
    """Put a batch of so many lines into the store."""
    part = content.begin()
    for number in range(lines):
        body = {"model": "m", "prompt": str(number)}
        line = {"custom_id": f"{name}-{number}", "method": "POST", "url": URL, "body": body}
        part.write(json.dumps(line).encode() + b"\n")
    file_id = f"file-{name:0>24}"
    part.keep(file_id)
    now_s = int(time.time())
    store.add_file(
        FileRecord(
            id=file_id,
            tenant=TENANT,
            filename="in.jsonl",
            purpose="batch",
            bytes=part.bytes,
            created_at=now_s,
            expires_at=now_s + 86_400,
        )
    )
    store.add_batch(
        BatchRecord(
            id=f"batch_{name}",
            tenant=TENANT,
            endpoint=URL,
            input_file_id=file_id,
            created_at=now_s,
            expires_at=now_s + 86_400,
        )
    )


async def work(folder: Path, *, to_the_end: bool) -> None:
    """Run batches until killed, or until none is left."""
    store = StoreCalls(lambda: SqliteStore(folder / "batches.sqlite3"))

    async def answer(call: LineCall) -> LineAnswer:
        await asyncio.sleep(random.uniform(0, 0.002))
        with (folder / "asked").open("ab") as log:
            log.write(b".")
        return LineAnswer(400 if b'"7"' in call.body else 200, call.body, "r")

    while True:
        # Without a lease: there is never more than one worker.
        claim = await store.call(lambda store: store.claim("w", time.time(), 0.0))
        if claim is not None:
            await BatchRun(claim, store, Content(folder / "files"), answer, lambda: 8).run()
        elif to_the_end:
            return
        else:
            await asyncio.sleep(3_600)


def fork_worker(folder: Path, *, to_the_end: bool) -> int:
    """Return the pid of a worker."""
    pid = os.fork()
    if pid:
        return pid
    try:
        random.seed(os.getpid())
        asyncio.run(work(folder, to_the_end=to_the_end))
        os._exit(0)
    finally:
        os._exit(1)


def main() -> None:
    """Kill, finish, tell."""
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    choose = random.Random(seed)
    content, path = Content(folder / "files"), folder / "batches.sqlite3"
    batches: dict[int, int] = {}
    life_s, killed, seen = LIFE_S_MIN, 0, b""
    while killed < kills:
        # Connections do not survive a fork.
        store = SqliteStore(path)
        counts = store._database.execute("SELECT group_concat(record) FROM batches").fetchone()
        (left,) = store._database.execute("SELECT count(*) FROM batches WHERE open").fetchone()
        if not left:
            batches[len(batches)] = choose.randint(1, LINES_MAX)
            make_batch(store, content, len(batches) - 1, batches[len(batches) - 1])
        store.close()
        # A machine on which a worker comes to nothing gives the next one longer.
        life_s = min(life_s * 1.5, LIFE_S_MAX) if counts == seen else LIFE_S_MIN
        seen = counts
        pid = fork_worker(folder, to_the_end=False)
        time.sleep(choose.uniform(0, 2 * life_s))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        killed += 1
    _, status = os.waitpid(fork_worker(folder, to_the_end=True), 0)
    asked = (folder / "asked").stat().st_size
    print(json.dumps({"killed": killed, "batches": batches, "status": status, "asked": asked}))


if __name__ == "__main__":
    main()
