"""The probe of a cell's ranks, against a coordinator that plays and against a real one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.harness.cells.coordinator_process import Coordinator
from tests.harness.cells.servers import free_port
from tests.helm.charts import CHART

KEY = "an-admin-key-for-tests"
PROBE_LIMIT_S = 60


def probe(port: int, question: str, key: str = KEY) -> int:
    """Ask as the kubelet does; returns the exit status."""
    env = {**os.environ, "AILERON_ADMIN_URL": f"http://127.0.0.1:{port}", "AILERON_ADMIN_KEY": key}
    command = [sys.executable, "-P", str(CHART / "scripts" / "cell_probe.py"), question]
    return subprocess.run(command, env=env, timeout=PROBE_LIMIT_S, check=False).returncode


@contextmanager
def coordinator_with(*available: bool) -> Iterator[int]:
    """An admin port that tells of ranks."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == f"Bearer {KEY}" and self.path == "/admin/ranks"
            self.send_response(200 if known else 401)
            self.end_headers()
            ranks = [{"rank": rank, "available": each} for rank, each in enumerate(available)]
            self.wfile.write(json.dumps({"ranks": ranks}).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_of_two_keys_that_rotate_it_sends_one() -> None:
    with coordinator_with(True) as port:
        assert probe(port, "ready", f"{KEY} another-key-for-tests") == 0


@pytest.mark.parametrize(
    ("available", "status"), [((True, True), 0), ((False, True), 0), ((False, False), 1), ((), 1)]
)
def test_a_cell_is_ready_and_lives_while_a_rank_can_serve(
    available: tuple[bool, ...], status: int
) -> None:
    with coordinator_with(*available) as port:
        assert probe(port, "ready") == status
        assert probe(port, "live") == status


def test_a_coordinator_that_is_away_or_refuses_is_no_reason_to_end_ranks() -> None:
    nobody = free_port()
    assert (probe(nobody, "ready"), probe(nobody, "live")) == (1, 0)
    with coordinator_with(True) as port:
        assert (probe(port, "ready", "wrong"), probe(port, "live", "wrong")) == (1, 0)


def test_a_real_coordinator_without_ranks_is_understood(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    with coordinator.running(AILERON_ADMIN_KEY=KEY):
        ranks = coordinator.get("/admin/ranks")["ranks"]
        assert [rank["available"] for rank in ranks] == [False, False]
        assert (probe(coordinator.admin, "ready"), probe(coordinator.admin, "live")) == (1, 1)


def test_other_questions_are_refused() -> None:
    assert probe(free_port(), "well") == 1
