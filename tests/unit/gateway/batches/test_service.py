"""The batch service beside a store that does not work."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from coordinator.protocol.config import BatchesConfig
from gateway.batches import service
from gateway.batches.setup import set_up_batches


async def _no_answer(_: Any) -> Any:
    raise AssertionError("there are no lines.")


async def _lines(folder: Path, rounds: int, *, repair_after: int) -> list[str]:
    """Run the service for some rounds; the folder becomes usable after some of them."""
    parts = set_up_batches(BatchesConfig(data_dir=str(folder / "data")), "one", _no_answer)
    assert parts is not None
    count = 0
    done = asyncio.Event()

    def publish(_: object) -> None:
        nonlocal count
        count += 1
        if count == repair_after:
            folder.unlink()
        if count == rounds:
            done.set()

    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(parts.desk.run(lambda: False, publish))
        async with asyncio.timeout(20):
            await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await parts.store.close()
    return [each["reason"] for each in logs if each["event"] == "batch_storage"]


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOOK_S", 0.01)


async def test_a_store_that_stays_broken_is_logged_once(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    lines = await _lines(folder, 6, repair_after=0)
    assert len(lines) == 1
    assert "cannot be used" in lines[0]


async def test_a_store_works_again_once_it_has_answered(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    first, second = await _lines(folder, 6, repair_after=3)
    assert ("cannot be used" in first, second) == (True, "works again.")
