"""The small OpenAI server on a thread of its own, and loadgen run against it in this process."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli import main
from tests.harness.loadgen.loadgen_server import FakeServer, serve


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake, ready, loop, stop = (
        FakeServer(),
        threading.Event(),
        asyncio.new_event_loop(),
        asyncio.Event(),
    )

    def live() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve(fake, ready, stop))
        loop.close()

    thread = threading.Thread(target=live)
    thread.start()
    assert ready.wait(60)
    yield fake
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def load(server: FakeServer, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run loadgen in this process and return its report."""

    def run(*options: str, status: int = 0) -> dict[str, Any]:
        out = tmp_path / "report.json"
        arguments = ["run", "--url", server.url, "--out", str(out), "--quiet", *options]
        assert main(arguments) == status
        report: dict[str, Any] = json.loads(out.read_text())
        return report

    return run
