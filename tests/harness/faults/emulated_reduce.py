"""A custom all-reduce without a GPU: counters in memory, and a thread for each block."""

import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from comm_pool.cuda.collective_abort import signal_bytes


def signal_type(peers: int) -> type[ctypes.Structure]:
    """vLLM's `Signal`: three arrays, each aligned to 128 bytes, as is the whole."""
    rows = (ctypes.c_uint32 * peers) * 36

    class Layout(ctypes.Structure):
        _fields_ = (
            ("start", rows),
            ("end", rows),
            ("flag", ctypes.c_uint32 * 36),
            ("padding", ctypes.c_uint8 * (128 - 36 * 4 % 128)),
        )

    return Layout


def let_through_in_torch(
    words: torch.Tensor, blocks: int, peers: int, apart: int, ahead: int, _passes: int
) -> None:
    """What the kernel does in one pass, which needs a GPU; `drain_cases.py` runs the kernel."""
    flags = words[2 * apart : 2 * apart + blocks][:, None].expand(blocks, peers)
    for step in range(1, ahead + 1):
        for first in (0, apart):
            torch.add(flags, step, out=words[first : first + blocks * peers].view(blocks, peers))


class Gpu:
    """One rank's counters, and the blocks of its all-reduce, each a thread."""

    def __init__(self, place: int, peers: int, blocks: int, *, shows_late: bool = False) -> None:
        self._place = place
        self._blocks = blocks
        self._shows_late = shows_late
        self.words = torch.zeros(signal_bytes(peers) // 4, dtype=torch.int32)
        self.signal: Any = signal_type(peers).from_address(self.words.data_ptr())
        self.passed = [0] * blocks
        self._threads: list[threading.Thread] = []
        self.dies = False

    def launch(self, gpus: Sequence["Gpu"], collectives: int) -> None:
        """Run kernels one behind the other, as in a graph; blocks meet those of their peers."""
        for block in range(self._blocks):
            args = (gpus, block, collectives)
            self._threads.append(threading.Thread(target=self._run, args=args, daemon=True))
        for thread in self._threads:
            thread.start()

    def _run(self, gpus: Sequence["Gpu"], block: int, collectives: int) -> None:
        flag = self.signal.flag[block]
        for _ in range(collectives):
            for barrier in ("start", "end"):
                flag = (flag + 1) & 0xFFFFFFFF
                for gpu in gpus:
                    getattr(gpu.signal, barrier)[block][self._place] = flag
                own = getattr(self.signal, barrier)[block]
                while any(own[peer] != flag for peer in range(len(gpus))):
                    if self.dies:
                        return
                    time.sleep(0)
                if barrier == "end" or not self._shows_late:
                    self.signal.flag[block] = flag
                self.passed[block] += 1

    def is_done(self, limit_s: float) -> bool:
        """Wait for the kernels."""
        until = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
