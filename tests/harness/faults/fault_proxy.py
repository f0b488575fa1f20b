"""A TCP proxy behind a cell's ranks that swallows what chosen processes say or hear.

Nothing is refused: bytes stand still, as when a cable is pulled, and go on when the fault heals,
late. Connections are closed only by `reset`, and what is under way on them is lost. Who is at the
other end of a connection is asked of the kernel.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

POLL_S = 0.01
CHUNK_BYTES = 65_536
UP, DOWN = "up", "down"
"""From a rank to its peer, and back."""


class FaultProxy:
    """Forwards connections of a loopback port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.target = ""
        self._cut: dict[int, frozenset[str]] = {}
        self._ports: dict[int, set[int]] = {}
        """The ports that processes which are cut off connect from."""
        self._open: set[tuple[int, asyncio.StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self, pid: int, *directions: str) -> None:
        """Let nothing through for this process in these directions, from now on."""
        self._ports[pid] = _ports_of(pid)
        self._cut[pid] = frozenset(directions)

    def heal(self) -> None:
        """Let everything through, what was held up first."""
        self._cut = {}

    def reset(self, pid: int) -> None:
        """Break the connections that this process has, as a router that forgot them does."""
        ports = _ports_of(pid)

        def abort() -> None:
            for port, writer in self._open:
                if port in ports:
                    writer.transport.abort()

        self._loop.call_soon_threadsafe(abort)

    @contextmanager
    def running(self, target: str) -> Iterator["FaultProxy"]:
        """Forward to `target` (host:port) for the length of the block."""
        self.target = target
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
        own = writer.get_extra_info("peername")[1]
        for pid in tuple(self._cut):
            self._ports[pid] |= await asyncio.to_thread(_ports_of, pid)
        host, port = self.target.rsplit(":", 1)
        there, back = await asyncio.open_connection(host, int(port))
        pumps = [
            asyncio.create_task(self._pump(own, UP, reader, back)),
            asyncio.create_task(self._pump(own, DOWN, there, writer)),
        ]
        ends = {(own, writer), (own, back)}
        self._open |= ends
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open -= ends
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            back.close()

    async def _pump(
        self,
        port: int,
        direction: str,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(CHUNK_BYTES):
                while self._is_cut(port, direction):
                    await asyncio.sleep(POLL_S)
                sink.write(data)
                await sink.drain()
        while self._is_cut(port, direction):
            await asyncio.sleep(POLL_S)  # That a peer is gone does not get through either.

    def _is_cut(self, port: int, direction: str) -> bool:
        return any(
            direction in directions and port in self._ports[pid]
            for pid, directions in self._cut.items()
        )


def _ports_of(pid: int) -> set[int]:
    """The ports that a process' TCP connections have on its side."""
    try:
        return {each.laddr.port for each in psutil.Process(pid).net_connections(kind="tcp")}
    except psutil.Error:
        return set()
