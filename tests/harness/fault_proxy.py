"""A TCP proxy between a cell's ranks and their coordinator that swallows what chosen processes say.

Nothing is refused and no connection is closed: bytes stand still, as when a cable is pulled, and
go on when the fault heals, late. Who is at the other end of a connection is asked of the kernel.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

POLL_S = 0.01
CHUNK_BYTES = 65_536
UP, DOWN = "up", "down"
"""From a rank to the coordinator, and back."""


class FaultProxy:
    """Forwards connections of a loopback port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._target = ""
        self._cut: dict[int, frozenset[str]] = {}
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self, pid: int, *directions: str) -> None:
        """Let nothing through for this process in these directions, from now on."""
        self._cut[pid] = frozenset(directions)

    def heal(self) -> None:
        """Let everything through, what was held up first."""
        self._cut = {}

    @contextmanager
    def running(self, target: str) -> Iterator["FaultProxy"]:
        """Forward to `target` (host:port) for the length of the block."""
        self._target = target
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connected, "127.0.0.1", self.port)
        )
        thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._end(server), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(10)
            self._loop.close()

    async def _end(self, server: asyncio.Server) -> None:
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid = await asyncio.to_thread(_owner, writer.get_extra_info("peername")[1])
        host, port = self._target.rsplit(":", 1)
        there, back = await asyncio.open_connection(host, int(port))
        pumps = [
            asyncio.create_task(self._pump(pid, UP, reader, back)),
            asyncio.create_task(self._pump(pid, DOWN, there, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            back.close()

    async def _pump(
        self,
        pid: int,
        direction: str,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(CHUNK_BYTES):
                while direction in self._cut.get(pid, ()):
                    await asyncio.sleep(POLL_S)
                sink.write(data)
                await sink.drain()
        while direction in self._cut.get(pid, ()):
            await asyncio.sleep(POLL_S)  # That a peer is gone does not get through either.


def _owner(port: int) -> int:
    """The process that holds the loopback connection from this port; 0 if it is gone."""
    for each in psutil.net_connections(kind="tcp"):
        if each.laddr and each.laddr.port == port and each.pid is not None:
            return each.pid
    return 0
