"""Runs native calls that may never return, in processes that the kernel kills in time.

A fork server is forked once, early, from a process that has imported what the calls need. It forks
workers on demand, so that one costs milliseconds. A worker sets an alarm before each call, which
kills it even while native code holds the interpreter. The caller sees its connection close, and the
next call gets a new worker. All end with the process that made the fork server.
"""

import array
import asyncio
import os
import signal
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NoReturn

WORKERS_MAX = 2
"""Most calls at once."""
ANSWERS_MAX = 1_024
"""Answers that are remembered, so that a repeated question costs nothing."""
LATE_S = 5.0
"""Longest silence of a worker after its alarm, before its call fails."""
WAIT_S = 30.0
"""Longest wait of a call for a worker."""
MESSAGE_BYTES_MAX = 16 * 1024**2

_LENGTH: Final = struct.Struct("!I")
_ADOPT = b"+"

Call = Callable[[bytes], bytes]


class TooSlowError(Exception):
    """The call did not end in time, or ended its process."""


class BusyError(Exception):
    """No worker became free within `WAIT_S`."""


class ForkServer:
    """The process that forks workers; create it before threads and event loops."""

    def __init__(self, prepare: Callable[[], Call], limit_s: float) -> None:
        """`prepare` runs once in the fork server and returns the workers' function."""
        self.limit_s = limit_s
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._control.close()
            _run_fork_server(theirs, prepare, limit_s)
        theirs.close()

    def hire(self) -> socket.socket:
        """Return the connection to a new worker, without waiting for the worker."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = array.array("i", [theirs.fileno()])
            self._control.sendmsg([_ADOPT], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        ours.setblocking(False)
        return ours

    def close(self) -> None:
        """End the fork server; its workers end with their connections."""
        self._control.close()
        os.waitpid(self.pid, 0)


class Sandbox:
    """Sends questions to workers of a fork server; belongs to one event loop."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._permits = asyncio.Semaphore(WORKERS_MAX)
        self._idle: list[socket.socket] = []
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()

    async def ask(self, question: bytes) -> bytes:
        """Return the answer to a question; raises `TooSlowError` or `BusyError`."""
        known = self._answers.get(question)
        if known is not None:
            self._answers.move_to_end(question)
            return known
        try:
            async with asyncio.timeout(WAIT_S):
                await self._permits.acquire()
        except TimeoutError:
            raise BusyError from None
        try:
            answer = await self._ask_worker(question)
        finally:
            self._permits.release()
        self._answers[question] = answer
        if len(self._answers) > ANSWERS_MAX:
            self._answers.popitem(last=False)
        return answer

    async def _ask_worker(self, question: bytes) -> bytes:
        worker = self._idle.pop() if self._idle else self._fork_server.hire()
        try:
            async with asyncio.timeout(self._fork_server.limit_s + LATE_S):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(worker, _LENGTH.pack(len(question)) + question)
                (size,) = _LENGTH.unpack(await _read(worker, _LENGTH.size))
                answer = await _read(worker, size)
        except (TimeoutError, OSError) as error:
            worker.close()
            raise TooSlowError from error
        except BaseException:
            # Nobody needs the answer any more; the worker's alarm ends it.
            worker.close()
            raise
        self._idle.append(worker)
        return answer

    def close(self) -> None:
        """End the workers and the fork server."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        self._fork_server.close()


async def _read(worker: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        piece = await loop.sock_recv(worker, size - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return bytes(data)


def _run_fork_server(
    control: socket.socket, prepare: Callable[[], Call], limit_s: float
) -> NoReturn:
    """Fork workers until the process that made this one is gone."""
    status = 1
    try:
        # Ctrl-C is for the gateway; this process ends when the gateway does.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        call = prepare()
        while True:
            message, fds, _, _ = socket.recv_fds(control, len(_ADOPT), 1)
            if not message:
                break
            connection = socket.socket(fileno=fds[0])
            if not os.fork():
                control.close()
                _run_worker(connection, call, limit_s)
            connection.close()
        status = 0
    finally:
        os._exit(status)


def _run_worker(connection: socket.socket, call: Call, limit_s: float) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with connection.makefile("rwb") as stream:
            while head := stream.read(_LENGTH.size):
                (size,) = _LENGTH.unpack(head)
                assert size <= MESSAGE_BYTES_MAX, size
                question = stream.read(size)
                signal.setitimer(signal.ITIMER_REAL, limit_s)
                answer = call(question)
                signal.setitimer(signal.ITIMER_REAL, 0)
                stream.write(_LENGTH.pack(len(answer)) + answer)
                stream.flush()
        status = 0
    finally:
        os._exit(status)
