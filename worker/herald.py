"""Tells the coordinator which ranks have ended, from a process of its own.

The launcher forks ranks again and again, so it must not have the threads of a gRPC client. It
writes what it saw into a pipe; this process holds the session, and says everything again whenever
a new one is opened.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc

from comm_pool.layout import Rank
from coordinator.protocol.launch_words import RanksEnded
from coordinator.protocol.messages import PROTOCOL_VERSION
from coordinator.protocol.wire import (
    CHANNEL_OPTIONS,
    LAUNCHER_PATH,
    TOKEN_METADATA_KEY,
    encode,
)

RECONNECT_S = 0.2
"""Pause between two attempts to reach the coordinator."""

PIPE_BYTES = 65_536

Ended = tuple[tuple[Rank, int], ...]
"""(rank, incarnation) of the newest process of each rank that ended."""


class HeraldPipe:
    """The launcher's end: `tell` never blocks and may be called again and again."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)

    def tell(self, ended: Ended) -> None:
        """Replace what was told before; a herald that does not read is told at the next end."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.writer, (json.dumps(ended) + "\n").encode())

    def close(self) -> None:
        """Close both ends in this process."""
        os.close(self.reader)
        os.close(self.writer)


def run_herald(target: str, token: str, reader: int) -> None:
    """Hold a session with the coordinator at `target` until the pipe ends."""
    asyncio.run(_Herald(target, token, reader).run())


class _Herald:
    def __init__(self, target: str, token: str, reader: int) -> None:
        self._target = target
        self._token = token
        self._reader = reader
        self._rest = b""
        self._ended: Ended = ()
        self._changed = asyncio.Event()
        self._closing = False

    async def run(self) -> None:
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)
        while not self._closing:
            with suppress(grpc.aio.AioRpcError):
                await self._one_session()
            if not self._closing:
                await asyncio.sleep(RECONNECT_S)

    def _read(self) -> None:
        data = os.read(self._reader, PIPE_BYTES)
        if not data:
            self._closing = True
            asyncio.get_running_loop().remove_reader(self._reader)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            self._ended = tuple((Rank(rank), number) for rank, number in json.loads(lines[-1]))
        self._changed.set()

    async def _one_session(self) -> None:
        async with grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS) as channel:
            method = channel.stream_stream(
                LAUNCHER_PATH, request_serializer=encode, response_deserializer=None
            )
            call = method(self._words(), metadata=((TOKEN_METADATA_KEY, self._token),))
            async for _ in call:
                pass  # The coordinator answers nothing; the loop ends with the session.

    async def _words(self) -> AsyncIterator[RanksEnded]:
        while not self._closing:
            self._changed.clear()
            yield RanksEnded(PROTOCOL_VERSION, self._ended)
            await self._changed.wait()
