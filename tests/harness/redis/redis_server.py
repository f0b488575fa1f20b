"""A Redis in a process of its own: the real server if it is installed, else one like it."""

import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import redis

from tests.harness.cells.servers import ROOT, free_port

START_S = 60
SHARED_WAIT_S = 0.05
"""No request may wait longer for Redis, whatever that does."""
IS_REAL = shutil.which("redis-server") is not None
"""Whether the server is the real one."""


class Redis:
    """The server; it may be stopped and started again on its port."""

    def __init__(self, unix_socket: Path | None = None) -> None:
        """A real one may listen on a Unix socket as well."""
        self.port = free_port()
        self._more = () if unix_socket is None else ("--unixsocket", str(unix_socket))
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.harness.redis.fake_redis", str(self.port)]
        if (installed := shutil.which("redis-server")) is not None:
            quiet = ("--save", "", "--appendonly", "no", "--loglevel", "warning")
            where = ("--bind", "127.0.0.1", "--port", str(self.port))
            command = [installed, *where, *self._more, *quiet]
        self.process = subprocess.Popen(command, cwd=ROOT)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with closing(socket.socket()) as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("the Redis server does not listen")

    def flush(self) -> None:
        """Forget everything."""
        with redis.Redis(port=self.port) as client:
            client.flushall()

    def keys(self) -> set[bytes]:
        """The names of all that is in it."""
        with redis.Redis(port=self.port) as client:
            return set(client.scan_iter())

    def limit_memory(self, limit: str) -> None:
        """Bound its memory, so that it is full; 0 is no bound. Only a real one can do this."""
        if IS_REAL:
            with redis.Redis(port=self.port) as client:
                client.config_set("maxmemory", limit)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
