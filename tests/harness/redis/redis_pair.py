"""A Redis and its replica: real servers where there are any, else two that speak the protocol.

What a client sees of a failover is the same with both, but that the second kind replicates nothing.
"""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Self

import redis

from coordinator.cli.ports import free_ports
from tests.harness.redis.redis_server import Redis

START_S = 60
SERVER = shutil.which("redis-server")


class RedisPair:
    """The first one is the primary, until `fail_over`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.is_real = SERVER is not None
        self._fakes: list[Redis] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        if SERVER is None:
            self._fakes = [Redis(), Redis()]
            self._processes = [each.process for each in self._fakes]
            self.ports = [each.port for each in self._fakes]
            return self
        self.ports = list(free_ports(2))
        for port in self.ports:
            self._start(SERVER, port, self.ports[0])
        replica = self.client(1)
        deadline = time.monotonic() + START_S
        while replica.info("replication").get("master_link_status") != "up":
            assert time.monotonic() < deadline, "the replica does not follow"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def client(self, number: int) -> "redis.Redis":
        """Return a client of one of the two."""
        return redis.Redis(port=self.ports[number], socket_timeout=START_S)

    def clients(self) -> "list[redis.Redis]":
        """Return clients of both, none where they only speak the protocol."""
        return [self.client(number) for number in range(2 * self.is_real)]

    def kill_primary(self) -> None:
        """Kill the first one as the kernel would."""
        self._processes[0].kill()
        self._processes[0].wait()

    def promote(self) -> None:
        """Make the replica the primary."""
        if self.is_real:
            self.client(1).replicaof("NO", "ONE")

    def _start(self, server: str, port: int, primary: int) -> None:
        folder = self._folder / str(port)
        folder.mkdir()
        words = [server, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        words += ["--save", "", "--repl-diskless-sync-delay", "0"]
        if port != primary:
            words += ["--replicaof", "127.0.0.1", str(primary)]
        self._processes.append(
            subprocess.Popen(words, stdout=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"})
        )
        with contextlib.closing(redis.Redis(port=port)) as probe:
            deadline = time.monotonic() + START_S
            while True:
                with contextlib.suppress(redis.ConnectionError):
                    probe.ping()
                    return
                assert time.monotonic() < deadline, "the Redis server does not answer"
                time.sleep(0.05)
