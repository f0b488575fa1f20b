"""Batches over processes that are killed: nothing is lost, nothing comes twice, one runs each."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from gateway.batches.content import Content
from gateway.batches.sqlite_store import SqliteStore
from gateway.batches.terms import Status
from tests.harness.cells.batch_process import OWN_MOUNTS, ROOT, BatchProcess
from tests.harness.faults.batch_killer import TENANT
from tests.harness.redis.redis_server import Redis

LIMIT_S = 90.0
DISK_WAIT_MS, SLOW_LINES = 50, 6
KILLS, KILLS_LONG = 30, 100


def ids_of(lines: list[bytes]) -> list[str]:
    return [json.loads(line)["custom_id"] for line in lines]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [KILLS, pytest.param(KILLS_LONG, marks=pytest.mark.long)])
def test_kills_lose_and_repeat_nothing(tmp_path: Path, kills: int) -> None:
    began = time.monotonic()
    words = ("-m", "tests.harness.faults.batch_killer", str(tmp_path), str(kills), "4711")
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["killed"] == kills
    assert told["status"] == 0, done.stderr[-3_000:]
    store, content = SqliteStore(tmp_path / "batches.sqlite3"), Content(tmp_path / "files")
    lines = 0
    for name, total in told["batches"].items():
        batch = store.batch(TENANT, f"batch_{name}")
        assert batch is not None
        assert batch.status is Status.COMPLETED
        found: list[str] = []
        for file_id, count in (
            (batch.output_file_id, batch.counts.completed),
            (batch.error_file_id, batch.counts.failed),
        ):
            texts = content.path(file_id).read_bytes().splitlines() if file_id else []
            assert len(texts) == count
            found += ids_of(texts)
            record = store.file(TENANT, file_id) if file_id else None
            assert record is None or record.bytes == content.path(record.id).stat().st_size
        assert sorted(found) == sorted(f"{name}-{number}" for number in range(total))
        assert store.recorded(batch.id) == []
        lines += total
    store.close()
    print(
        f"{kills} kills, {len(told['batches'])} batches, {lines} lines, "
        f"{told['asked'] - lines} lines asked again, {time.monotonic() - began:.1f} s"
    )
    assert told["asked"] >= lines


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[..., BatchProcess]]:
    made: list[BatchProcess] = []

    def start(**settings: Any) -> BatchProcess:
        made.append(BatchProcess(tmp_path, "", **settings))
        return made[-1]

    yield start
    for process in made:
        process.close()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def client_of(process: BatchProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=process.url + "/v1", api_key="none")


def lines_of(client: openai.OpenAI, batch: Batch) -> list[str]:
    found: list[str] = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            found += ids_of(client.files.content(file_id).content.splitlines())
    return found


def some_lines(prompts: list[str]) -> bytes:
    lines = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": prompt},
        }
        for number, prompt in enumerate(prompts)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def answered_any(process: BatchProcess) -> bool:
    """Say whether some line has run there."""
    return bool(httpx.get(process.url + "/health").json()["most"])


@pytest.fixture(params=["sqlite", "redis"])
def storage(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "sqlite":
        yield "sqlite://"
        return
    redis = Redis()
    yield redis.url
    redis.stop()


def half_done(client: openai.OpenAI) -> Batch:
    """A batch with four lines that are answered, and four that take an hour."""
    data = some_lines([*(["quick"] * 4), *(["slow"] * 4)])
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )

    def waits() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed == 4

    until(waits)
    return batch


def check_half(client: openai.OpenAI, end: Batch, code: str) -> None:
    """What was answered is in the output, and the rest is told."""
    assert end.output_file_id is not None
    assert end.error_file_id is not None
    output = client.files.content(end.output_file_id).content.splitlines()
    errors = client.files.content(end.error_file_id).content.splitlines()
    assert sorted(ids_of(output)) == ["c0", "c1", "c2", "c3"]
    assert sorted(ids_of(errors)) == ["c4", "c5", "c6", "c7"]
    assert {json.loads(line)["error"]["code"] for line in errors} == {code}


@pytest.mark.parametrize("how", ["cancel", "expire"])
def test_clients_see_how_a_batch_is_cut_short(
    processes: Callable[..., BatchProcess], storage: str, how: str
) -> None:
    """A window of seconds stands for one of 24 hours."""
    window = {"window_s": 3} if how == "expire" else {}
    process = processes(lines_at_once=4, storage=storage, **window)
    status, code = {
        "cancel": ("cancelled", "batch_cancelled"),
        "expire": ("expired", "batch_expired"),
    }[how]
    with client_of(process) as client:
        batch = half_done(client)
        if how == "cancel":
            assert client.batches.cancel(batch.id).status == "cancelling"

        def ended() -> Batch | None:
            now = client.batches.retrieve(batch.id)
            return now if now.status == status else None

        end = until(ended)
        assert [end.cancelled_at is not None, end.expired_at is not None] == [
            how == "cancel",
            how == "expire",
        ]
        check_half(client, end, code)
        until(lambda: not httpx.get(process.url + "/health").json()["now"])


def test_lines_run_in_the_lowest_tier(processes: Callable[..., BatchProcess]) -> None:
    """What the application is told of each request's tier, beside a client's that says nothing."""
    process = processes(lines_at_once=4)
    with client_of(process) as client:
        file = client.files.create(file=("in.jsonl", some_lines(["a", "b"])), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        until(lambda: client.batches.retrieve(batch.id).status == "completed")
        client.completions.create(model="m", prompt="chat")
    tiers = httpx.get(process.url + "/health").json()["tiers"]
    assert tiers == {"a": "BATCH", "b": "BATCH", "chat": "STANDARD"}


@pytest.mark.timeout(300)
def test_another_process_takes_a_batch_over(
    processes: Callable[..., BatchProcess], storage: str
) -> None:
    how = {"lines_at_once": 4, "lease_ms": 1_000, "storage": storage}
    prompts = [*(["quick"] * 19), "bad", *(["slow"] * 10)]
    names = sorted(f"c{number}" for number in range(30))
    # Here the slow lines take an hour, there they are as quick as the others.
    holder = processes(**how)
    with client_of(holder) as first:
        file = first.files.create(file=("in.jsonl", some_lines(prompts)), purpose="batch")
        batch = first.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

        def waits() -> bool:
            counts = first.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed + counts.failed == 20

        until(waits)
    other = processes(**how, slow_s=0)
    holder.kill()
    killed = time.monotonic()
    with client_of(other) as second:
        until(lambda: answered_any(other))
        took_s = time.monotonic() - killed

        def ended() -> Batch | None:
            now = second.batches.retrieve(batch.id)
            return now if now.status == "completed" else None

        end = until(ended)
        assert sorted(lines_of(second, end)) == names
        assert end.request_counts.failed == 1
    print(f"killed at 20 of 30 lines, taken over after {took_s:.1f} s")


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    subprocess.run([*OWN_MOUNTS, "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine lets nobody mount a small disk of their own",
)
def test_a_disk_that_is_full(processes: Callable[..., BatchProcess]) -> None:
    """A real one, of 12 MiB: uploads are refused, a batch waits, chat goes on, and then it ends."""
    process = processes(disk_bytes=12 * 1024**2, lines_at_once=8)
    ballast: list[str] = []
    refusals: list[tuple[int, str | None]] = []
    with client_of(process) as client:
        patient = client.with_options(max_retries=20)
        quick = client.with_options(max_retries=0)

        def is_full() -> bool:
            try:
                made = quick.files.create(file=("b", b"b" * 400_000), purpose="batch")
            except openai.InternalServerError as full:
                refusals.append((full.status_code, full.code))
                return True
            ballast.append(made.id)
            return False

        # Results are as long as their prompts, and do not fit into what one file leaves.
        data = some_lines([f"{number} {'x' * 2_000}" for number in range(400)])
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        until(is_full)
        patient.files.delete(ballast.pop())
        batch = patient.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        until(lambda: (counts := client.batches.retrieve(batch.id).request_counts) and counts.total)
        until(is_full)
        stuck = client.batches.retrieve(batch.id)
        assert stuck.status in ("in_progress", "finalizing")
        asked = {"model": "m", "prompt": "hi"}
        chat = httpx.post(process.url + "/v1/completions", json=asked, timeout=LIMIT_S)
        assert chat.status_code == 200
        files = len(ballast)

        def are_deleted() -> bool:
            """Ask once for each file that is left: the batch may take the room of one at once."""
            for each in list(ballast):
                try:
                    assert quick.files.delete(each).deleted
                except openai.InternalServerError as full:
                    refusals.append((full.status_code, full.code))
                else:
                    ballast.remove(each)
            return not ballast

        until(are_deleted)

        def ended() -> Batch | None:
            now = client.batches.retrieve(batch.id)
            return now if now.status == "completed" else None

        end = until(ended)
        assert lines_of(client, end) == [f"c{number}" for number in range(400)]
    assert set(refusals) == {(503, "storage_full")}
    print(f"full after {files} files of 400 kB, the batch at {stuck.request_counts}")


def chat_ms(process: BatchProcess, prompt: str, number: int) -> list[float]:
    """Answer times of requests one after another."""
    times = []
    body = {"model": "m", "prompt": prompt}
    with httpx.Client(base_url=process.url, timeout=60) as client:
        for _ in range(number):
            began = time.perf_counter()
            assert client.post("/v1/completions", json=body).status_code == 200
            times.append((time.perf_counter() - began) * 1_000)
    return times


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("cc") is None, reason="NOT RUN: no C compiler for a slow disk")
def test_a_disk_that_is_slow(processes: Callable[..., BatchProcess]) -> None:
    """Each touch of a file takes 50 ms: that is a batch's matter, and not that of any chat."""
    process = processes(disk_wait_ms=DISK_WAIT_MS, lines_at_once=64)
    prompts = {"small": "hi", "large": "hi " * 200_000}
    before = {name: chat_ms(process, prompt, 8) for name, prompt in prompts.items()}
    with client_of(process) as client:
        data = some_lines(["quick"] * SLOW_LINES)
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        began = time.monotonic()
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        during: dict[str, list[float]] = {name: [] for name in prompts}

        def ended() -> Batch | None:
            for name, prompt in prompts.items():
                during[name] += chat_ms(process, prompt, 2)
            now = client.batches.retrieve(batch.id)
            return now if now.status == "completed" else None

        end = until(ended)
        assert sorted(lines_of(client, end)) == sorted(f"c{number}" for number in range(SLOW_LINES))
    print(f"{SLOW_LINES} lines took {time.monotonic() - began:.1f} s")
    for name, times in during.items():
        calm, busy = statistics.median(before[name]), statistics.median(times)
        print(f"{name}: median {calm:.1f} -> {busy:.1f} ms of {len(times)}, worst {max(times):.0f}")
        # Had each waited for the disk, the quickest would have taken that long as well.
        assert min(times) < max(DISK_WAIT_MS, 3 * calm)
