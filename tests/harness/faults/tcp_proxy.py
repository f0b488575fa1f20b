"""A TCP address whose other side can be changed, slowed, silenced or cut off.

It runs in a thread of the test.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, Self

CHUNK_BYTES = 65_536


class TcpProxy:
    """Listens on a port of its own and passes everything on to `target`."""

    def __init__(self, target: int) -> None:
        """`target` is a port of this machine; 0 refuses connections."""
        self.target = target
        self.is_silent = False
        """Whether connections are taken and nothing is passed on any more."""
        self.delay_s = 0.0
        """How long each answer of the other side is held back."""
        self._pairs: set[asyncio.StreamWriter] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def refuse(self) -> None:
        """Reset every connection, and take no more until there is another target."""
        self.target = 0
        self.cut()

    def cut(self) -> None:
        """Reset every connection that is open."""
        self._call(self._cut())

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _cut(self) -> None:
        for writer in self._pairs:
            writer.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        await asyncio.gather(*self._work, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._work.add(task)
        self._pairs.add(writer)
        try:
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection("127.0.0.1", self.target)
                self._pairs.add(back)
                try:
                    await asyncio.gather(
                        self._pass(reader, back), self._pass(there, writer, is_answer=True)
                    )
                finally:
                    self._pairs.discard(back)
                    back.close()
        finally:
            self._pairs.discard(writer)
            writer.close()
            self._work.discard(task)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        is_answer: bool = False,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if is_answer:
                    await asyncio.sleep(self.delay_s)
                if not self.is_silent:
                    writer.write(data)
                    await writer.drain()
        writer.close()
