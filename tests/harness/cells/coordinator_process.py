"""`python -m coordinator` as a process of its own, for tests that bring its ranks themselves."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.cli.ports import free_ports
from coordinator.protocol.config import check_config, dump_config

TOKEN = "a-secret-for-tests-only"
START_LIMIT_S = 30


class Coordinator:
    """A coordinator's configuration, and the process that runs it."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.grpc, self.admin = free_ports(2)
        self.file = folder / "cell.yaml"
        config = {
            "model": {"path": "a/model"},
            "cell": {"ranks": 2, "layout": "dp2", "widths": [1, 2]},
            "coordinator": {"listen": f"127.0.0.1:{self.grpc}", "heartbeat_ms": 20},
            "admin": {"port": self.admin},
            **sections,
        }
        self.file.write_text(dump_config(check_config(config)))

        self._key = ""

    def start(self, **env: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "coordinator", "--config", str(self.file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "AILERON_TOKEN": TOKEN, **env},
        )

    @contextmanager
    def running(self, **env: str) -> Iterator["subprocess.Popen[str]"]:
        """Run it for the length of the block, from when it accepts sessions."""
        self._key = env.get("AILERON_ADMIN_KEY", "")
        with self.start(**env) as process:
            try:
                assert process.stdout is not None
                assert json.loads(process.stdout.readline())["event"] == "coordinator_ready"
                yield process
            finally:
                process.kill()

    def get(self, path: str) -> Any:
        """GET on the admin port, and decode."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.admin}{path}")
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    async def serving(self) -> Any:
        async with asyncio.timeout(START_LIMIT_S):
            while not (layout := await asyncio.to_thread(self.get, "/admin/layout"))["serving"]:
                await asyncio.sleep(0.02)
        return layout
