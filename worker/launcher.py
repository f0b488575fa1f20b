"""Imports vLLM and reads the engine configuration once, and forks one process per rank from that.

A fork costs milliseconds where an import costs seconds. The launcher itself never computes, so no
thread pool or device context exists when it forks. It ends when all ranks have ended, and ends them
all when one dies: a cell without one of its ranks is the coordinator's to heal, not the launcher's.
"""

import ctypes
import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import structlog

from comm_pool.layout import Rank
from coordinator.protocol.config import Config
from worker.rank_process import announce, build_engine, serve_rank
from worker.vllm_config import EngineConfig, replica_config

log = structlog.get_logger()

STOP_LIMIT_S = 10.0
"""How long ranks may take to end after SIGTERM before they are killed."""

PR_SET_PDEATHSIG = 1


def fork_rank(rank: Rank, run: Callable[[], None]) -> int:
    """Fork; the child runs `run` and exits 0, or prints why not and exits 1. Returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        run()
        status = 0
    except BaseException as error:  # noqa: BLE001 -- the end of this process, whatever it is
        traceback.print_exc()
        announce("rank_failed", rank=rank, reason=f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown would run destructors of torch and ZeroMQ in an order nobody tests.
    os._exit(status)


class Launcher:
    """The rank processes of one cell on this host."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pids: dict[int, Rank] = {}
        self._stopping = False

    def run(self) -> int:
        """Start all ranks and wait for them; returns the exit code."""
        announce("worker_progress", stage="config", done=0, total=1)
        base = replica_config(self._config)
        announce("worker_progress", stage="config", done=1, total=1)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        for number in range(self._config.cell.ranks):
            self._start(base, Rank(number))
        return self._wait()

    def _start(self, base: EngineConfig, rank: Rank) -> None:
        incarnation = time.time_ns() // 1_000_000_000
        pid = fork_rank(rank, lambda: serve_rank(self._config, base, rank, incarnation))
        self._pids[pid] = rank
        announce("rank_started", rank=rank, pid=pid)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stopping = True
        for pid in self._pids:
            os.kill(pid, signal.SIGTERM)
        signal.signal(signal.SIGALRM, self._kill)
        signal.setitimer(signal.ITIMER_REAL, STOP_LIMIT_S)

    def _kill(self, _number: int, _frame: object) -> None:
        for pid, rank in self._pids.items():
            log.warning("rank_killed", rank=rank, reason=f"it ran on for {STOP_LIMIT_S} s")
            os.kill(pid, signal.SIGKILL)

    def _wait(self) -> int:
        failed = False
        while self._pids:
            pid, status = os.wait()
            rank = self._pids.pop(pid, None)
            if rank is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            announce("rank_exited", rank=rank, pid=pid, code=code)
            if code != 0 and not self._stopping:
                failed = True
                self._on_signal(0, None)
        return 1 if failed else 0


def probe(config: Config) -> int:
    """Build all ranks' engines, print what each holds in memory, and end; for `aileron doctor`."""
    base = replica_config(config)

    def run(rank: Rank) -> None:
        engine = build_engine(config, base, rank)
        announce(
            "rank_probed",
            rank=rank,
            pages=engine.kv.num_pages,
            memory=dict(engine.memory()),
            communicator_ms=engine.communicator_ms(),
            modes=[name for each in engine.step_times() for name in each.names],
        )
        engine.communicators.of_width(max(config.cell.widths)).group.barrier()

    ranks = [Rank(number) for number in range(config.cell.ranks)]
    pids = [fork_rank(rank, functools.partial(run, rank)) for rank in ranks]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return 0 if not any(codes) else 1
