"""Imports vLLM and reads the engine configuration once, then forks one process per rank.

A fork costs milliseconds where an import costs seconds. The launcher never computes, so it has no
thread pool or device context when it forks. It notices at once when a rank ends, reports that
through the exit reporter and restarts the rank; a rank that fails before the whole cell was ready
ends everything. SIGUSR1 restarts all ranks together, or those that the exit reporter names. The
launcher makes and keeps the memory that ranks share, so it outlives each of them.
"""

import ctypes
import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import structlog

from comm_pool.layout import Rank
from comm_pool.ports import free_ports
from coordinator.protocol.cell_tls import cell_tls_of
from coordinator.protocol.config import Config, shared_token
from coordinator.protocol.failure_reason import reason_of
from coordinator.protocol.host_memory import with_host_kv
from worker.cohort import Cohort
from worker.engine.config import EngineConfig, replica_config
from worker.engine.device import prepare_launcher
from worker.launch.exit_reporter import ExitPipe, OrderPipe, ProcessStatus, run_exit_reporter
from worker.launch.heartbeat import Heartbeat
from worker.launch.life_locks import LifeLocks
from worker.launch.process import announce, build_engine, serve_rank
from worker.launch.restarts import Restarts, split
from worker.launch.watchdog import Progress
from worker.memories import Memories
from worker.spec import everyone, rank_spec

log = structlog.get_logger()

STOP_LIMIT_S = 10.0
"""Maximum time for ranks to end after SIGTERM before they are killed."""

TOGETHER_MARGIN_S = {"cpu": 0.5, "cuda": 1.0}
"""Ranks that end within this time plus `stuck_after_ms` are restarted together.

On CUDA the survivors first try to abort their collectives, and releasing a device takes 0.3 s.
"""

EXIT_REPORTER_PAUSE_S = 0.1
"""Pause before the exit reporter is restarted, so that one that cannot start costs little."""

WAKE_S = 0.5
"""Maximum wait for a signal; the launcher then checks all ranks anyway."""

DUE_WAKE_S = 0.1
"""The same while a rank waits for its restart: as often as ranks beat."""

PROBE_PAUSE_S = 0.02
"""Pause between two looks at the processes of a probe."""

PR_SET_PDEATHSIG = 1
AWAITED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that the launcher waits for instead of handling them as interrupts."""

READY = b"r"

WITHOUT_ERROR = (0, -signal.SIGKILL)
"""Exit codes of processes that may have been as they should when they ended."""
REASON_BYTES_MAX = 4_096
"""Less than a pipe holds, so that a failing rank never waits for the launcher."""


def fork_rank(
    rank: Rank, run: Callable[[], None], tell: Callable[[str], None] = lambda _: None
) -> int:
    """Fork; the child runs `run` and exits 0, or prints the error and exits 1. Returns its pid.

    The child calls `tell` with the reason of its failure.
    """

    def failed(error: BaseException) -> None:
        reason = reason_of(error)
        announce("rank_failed", rank=rank, reason=reason)
        tell(reason)

    return _fork(run, failed)


def _fork(run: Callable[[], None], failed: Callable[[BaseException], None]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        # Ctrl-C reaches all processes of a terminal; the launcher ends its own in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        run()
        status = 0
    except BaseException as error:  # noqa: BLE001 -- the end of this process, whatever it is
        traceback.print_exc()
        failed(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown would run destructors of torch and ZeroMQ in an untested order.
    os._exit(status)


class Launcher:
    """The rank processes of one cell on this host."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pids: dict[int, Rank] = {}
        self._ready: dict[Rank, int] = {}
        """The pipe on which each rank's process signals that it can serve."""
        self._crashed: set[Rank] = set()
        """Ranks whose last process has ended by an error of its own; until the next one serves."""
        self._reasons: dict[Rank, int] = {}
        """The pipe on which each rank's process says why it fails."""
        self._heartbeats: dict[int, tuple[Heartbeat, Progress]] = {}
        """Heartbeat and progress tracker per child pid."""
        # Members that wait for a lost one end a little later than it does.
        margin_s = TOGETHER_MARGIN_S[config.cell.device]
        together_s = config.cell.stuck_after_ms / 1e3 + margin_s
        self._shares_memory = config.cell.device == "cpu"
        self._restarts = Restarts(
            config.cell.ranks,
            together_s,
            shares_memory=self._shares_memory,
            # A rank with one part of the weights needs those that hold the others, also to borrow
            # from: what they mapped of a process ends with it. In shared memory it joins them.
            block=1 if self._shares_memory else config.copy_width,
        )
        self._memories = Memories()
        self._cohort = 0
        """The number of that cohort."""
        self._lives = LifeLocks(config.cell.ranks)
        self._pipe = ExitPipe()
        self._orders = OrderPipe()
        self._exit_reporter_pid = 0
        self._is_host_kv_optional = False
        """Whether nobody asked for host pages."""
        self._is_stopping = False
        self._is_renewing = False
        """Whether all ranks are ending and then restart together."""
        self._reason = ""
        """Why the first rank failed that could not start."""
        self._kill_at_s: dict[int, float] = {}
        """When to kill the processes that were asked to end, by pid."""

    def run(self) -> int:
        """Start all ranks and keep them up until a signal; return the exit code."""
        announce("worker_progress", stage="config", done=0, total=1)
        base = replica_config(self._config)
        prepare_launcher(base)
        announce("worker_progress", stage="config", done=1, total=1)
        # Block these signals from here on, so that none is lost between two waits for them.
        signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
        self._start_exit_reporter()
        # vLLM may leave the prefix cache out for a model.
        has_hashes = bool(base.cache_config.enable_prefix_caching)
        self._is_host_kv_optional = self._config.cell.host_kv_gib == "auto"
        self._config = with_host_kv(self._config, has_hashes=has_hashes)
        cell = self._config.cell
        if self._is_host_kv_optional:
            gib = float(cell.host_kv_gib)
            log.info("host_kv_sized", gib=round(gib, 1), has_prefix_cache=has_hashes)
        if cell.host_kv_gib:
            self._memories.make_host_pages()
        self._start(base, everyone(self._config), cell.dist_port)
        failed = self._keep_up(base)
        os.kill(self._exit_reporter_pid, signal.SIGKILL)
        os.waitpid(self._exit_reporter_pid, 0)
        if failed:
            # The last line that the process prints.
            print(f"aileron: {self._reason}", file=sys.stderr, flush=True)
        return 1 if failed else 0

    def _start_exit_reporter(self) -> None:
        listen, token = self._config.coordinator.listen, shared_token()

        launcher = os.getpid()

        def order(ranks: tuple[Rank, ...]) -> None:
            self._orders.order(ranks)
            os.kill(launcher, signal.SIGUSR1)

        def run() -> None:
            os.close(self._pipe.writer)
            self._memories.close()
            tls = cell_tls_of(self._config.cell_tls)
            run_exit_reporter(listen, token, self._pipe.reader, order, self._lives, tls)

        self._exit_reporter_pid = _fork(run, lambda _: None)
        self._send_status()

    def _send_status(self) -> None:
        now = self._restarts
        self._pipe.send(
            ProcessStatus(
                *(now.ended(), now.newest(), now.without_fault(), now.falling()), now.block
            )
        )

    def _start(self, base: EngineConfig, ranks: tuple[Rank, ...], port: int) -> None:
        joins = self._shares_memory and len(ranks) < self._config.cell.ranks
        if not joins:
            self._cohort = time.time_ns()
            self._memories.renew(self._config, ranks)
        cohort = Cohort(self._cohort, ranks, port, joins)
        wall_s = int(time.time())
        together = {rank: self._restarts.started(rank, cohort, wall_s) for rank in ranks}
        for rank in ranks:
            self._start_rank(base, rank, cohort, together)
        self._send_status()

    def _start_rank(
        self, base: EngineConfig, rank: Rank, cohort: Cohort, together: Mapping[Rank, int]
    ) -> None:
        incarnation = together[rank]
        reader, writer = os.pipe()
        reason_reader, reason_writer = os.pipe()
        for each in (reader, reason_reader):
            os.set_blocking(each, False)
        heartbeat = Heartbeat()
        self._lives.renew(rank)

        def is_ready() -> None:
            os.write(writer, READY)

        def run() -> None:
            self._lives.hold(rank)
            self._pipe.close()
            self._orders.close()
            spec = rank_spec(self._config, rank, cohort, self._memories, together)
            is_optional, crashed = self._is_host_kv_optional, rank in self._crashed
            spec = replace(spec, host_kv_is_optional=is_optional, crashed=crashed)
            serve_rank(self._config, base, spec, incarnation, is_ready, heartbeat.beat)
            self._lives.release(rank)

        def tell(reason: str) -> None:
            os.write(reason_writer, reason.encode()[:REASON_BYTES_MAX])

        pid = fork_rank(rank, run, tell)
        os.close(writer)
        os.close(reason_writer)
        self._pids[pid] = rank
        self._ready[rank], self._reasons[rank] = reader, reason_reader
        limit_s = self._config.cell.step_limit_ms / 1e3
        self._heartbeats[pid] = heartbeat, Progress(lambda: heartbeat.beats, limit_s, WAKE_S)
        announce("rank_started", rank=rank, pid=pid, incarnation=incarnation, dist_port=cohort.port)

    def _keep_up(self, base: EngineConfig) -> bool:
        """Wait until all ranks have ended for good; return whether that was a failure."""
        failed = False
        while self._pids or (not self._is_stopping and self._are_due):
            self._await_signal()
            self._note_ready_ranks()
            failed |= self._reap_ended()
            now_s = time.monotonic()
            self._kill_late(now_s)
            self._kill_stuck(now_s)
            self._restarts.hasten(self._passes(), now_s)
            if not self._is_stopping:
                self._start_due(base, now_s)
        return failed

    @property
    def _are_due(self) -> bool:
        return self._is_renewing or self._restarts.next_due_s() is not None

    def _start_due(self, base: EngineConfig, now_s: float) -> None:
        cell = self._config.cell
        due = self._restarts.take_due(now_s)
        if self._is_renewing:
            due = [] if self._pids else list(everyone(self._config))
        if due:
            self._is_renewing = False
        # With shared memory each rank can start alone.
        for ranks in split(due, () if self._shares_memory else cell.widths, cell.ranks):
            # If another process takes the port first, the start fails and is retried.
            port = 0 if self._shares_memory else free_ports(1)[0]
            self._start(base, ranks, port)

    def _passes(self) -> dict[Rank, int]:
        """Return how far the main loop of each rank that serves is."""
        found = ((self._pids[pid], each) for pid, (each, _) in self._heartbeats.items())
        return {rank: heartbeat.passes for rank, heartbeat in found if heartbeat.beats}

    def _await_signal(self) -> None:
        wait_s, due_s = WAKE_S, self._restarts.next_due_s()
        if due_s is not None and not (self._is_stopping or self._is_renewing):
            wait_s = min(DUE_WAKE_S, max(0.0, due_s - time.monotonic()))
        received = signal.sigtimedwait(AWAITED, wait_s)
        if received is None or received.si_signo == signal.SIGCHLD:
            return
        if received.si_signo != signal.SIGUSR1:
            self._stop()
            return
        orders = self._orders.take() or [everyone(self._config)]
        if self._restarts.all_were_ready and not (self._is_stopping or self._is_renewing):
            for ranks in orders:
                self._renew(ranks)

    def _renew(self, ranks: tuple[Rank, ...]) -> None:
        log.info("ranks_renewed", ranks=ranks)
        if len(ranks) == self._config.cell.ranks:
            self._is_renewing = True
            self._restarts.forgive()
        else:
            ranks = self._restarts.renew(ranks, time.monotonic())
            self._send_status()
        self._end(ranks)

    def _stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._end(everyone(self._config))

    def _end(self, ranks: tuple[Rank, ...]) -> None:
        for pid in [pid for pid, rank in self._pids.items() if rank in ranks]:
            self._kill_at_s[pid] = time.monotonic() + STOP_LIMIT_S
            os.kill(pid, signal.SIGTERM)

    def _kill_late(self, now_s: float) -> None:
        for pid in [pid for pid, at_s in self._kill_at_s.items() if now_s >= at_s]:
            reason = f"it did not end within {STOP_LIMIT_S} s of SIGTERM"
            log.warning("rank_killed", rank=self._pids[pid], reason=reason)
            os.kill(pid, signal.SIGKILL)

    def _kill_stuck(self, now_s: float) -> None:
        for heartbeat, progress in self._heartbeats.values():
            if heartbeat.beats:  # A process that starts has none yet.
                progress.look(now_s)
        stuck = [pid for pid, (_, progress) in self._heartbeats.items() if progress.is_stuck]
        for pid in stuck:
            reason = "its whole process makes no progress"
            log.warning("rank_stuck", rank=self._pids[pid], reason=reason)
            os.kill(pid, signal.SIGKILL)
            self._drop_heartbeat(pid)

    def _drop_heartbeat(self, pid: int) -> None:
        if (watched := self._heartbeats.pop(pid, None)) is not None:
            watched[0].close()

    def _note_ready_ranks(self) -> None:
        for rank, reader in self._ready.items():
            with suppress(BlockingIOError):
                if os.read(reader, 1) == READY:
                    self._restarts.ready(rank, time.monotonic())
                    self._crashed.discard(rank)

    def _reap_ended(self) -> bool:
        """Handle all processes that ended; return whether the cell cannot start."""
        failed = False
        while (ended := _next_ended()) is not None:
            pid, status = ended
            if pid == self._exit_reporter_pid:
                time.sleep(EXIT_REPORTER_PAUSE_S)
                self._start_exit_reporter()
            elif (rank := self._pids.pop(pid, None)) is not None:
                failed |= self._rank_ended(rank, pid, os.waitstatus_to_exitcode(status))
        return failed

    def _rank_ended(self, rank: Rank, pid: int, code: int) -> bool:
        os.close(self._ready.pop(rank))
        reason = self._take_reason(rank)
        self._drop_heartbeat(pid)
        self._kill_at_s.pop(pid, None)
        if code not in WITHOUT_ERROR:
            self._crashed.add(rank)
        cannot_start = code != 0 and not (self._is_stopping or self._restarts.all_were_ready)
        stuck = self._restarts.waits_for(rank) if code else []
        delay_s = None
        leaves_alone = code == 0 and not self._restarts.falls_together
        if self._is_renewing or leaves_alone or self._is_stopping or cannot_start:
            self._restarts.record_end(rank)
        else:
            delay_s = self._restarts.exited(rank, time.monotonic())
        self._send_status()
        announce("rank_exited", rank=rank, pid=pid, code=code, starts_in_s=delay_s)
        if cannot_start:
            self._reason = self._reason or f"rank {rank} failed: {reason or _words_for(code)}"
            self._stop()
        elif not (self._is_stopping or self._is_renewing):
            falling = {*stuck, *(self._restarts.fall_with(rank) if delay_s is not None else ())}
            for pid in [pid for pid, each in self._pids.items() if each in falling]:
                os.kill(pid, signal.SIGKILL)
        return cannot_start

    def _take_reason(self, rank: Rank) -> str:
        """Close the pipe of a rank that has ended; return what it wrote about its failure."""
        with os.fdopen(self._reasons.pop(rank), "rb") as reasons:
            return (reasons.read() or b"").decode(errors="replace")


def _words_for(code: int) -> str:
    """Return the reason of a process that ended without giving one."""
    if code >= 0:
        return f"its process ended with status {code}; see the lines above."
    return f"its process was ended by {signal.Signals(-code).name}; see the lines above."


def _next_ended() -> tuple[int, int] | None:
    """Return an ended child and its status; None if there is none."""
    with suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            return pid, status
    return None


def probe(config: Config) -> int:
    """Build all ranks' engines, print the memory that each uses, and end; for `aileron doctor`."""
    base = replica_config(config)
    prepare_launcher(base)
    ranks = everyone(config)
    cohort = Cohort(0, ranks, config.cell.dist_port)
    memories = Memories()
    memories.renew(config, ())

    def run(rank: Rank) -> None:
        engine = build_engine(base, rank_spec(config, rank, cohort, memories))
        announce(
            "rank_probed",
            rank=rank,
            pages=engine.kv.num_pages,
            memory=dict(engine.memory()),
            communicator_ms=engine.communicator_ms(),
            modes=[name for each in engine.step_times() for name in each.names],
        )
        engine.communicators.of_width(max(config.cell.widths)).group.barrier()

    reader, writer = os.pipe()

    def tell(rank: Rank, reason: str) -> None:
        os.write(writer, f"rank {rank} failed: {reason}\n".encode()[:REASON_BYTES_MAX])

    pids = {
        fork_rank(rank, functools.partial(run, rank), functools.partial(tell, rank)): rank
        for rank in ranks
    }
    os.close(writer)
    if reason := await_probes(pids, reader):
        print(f"aileron: {reason}", file=sys.stderr, flush=True)
    return 1 if reason else 0


def await_probes(pids: Mapping[int, Rank], reasons: int) -> str:
    """Wait until all processes have ended; return why the first one failed, or nothing.

    A failure ends the others, which may wait for the lost rank. Closes the pipe of `reasons`; what
    a rank has started may hold it open on the other side.
    """
    os.set_blocking(reasons, False)
    waiting, reason = dict(pids), ""
    with os.fdopen(reasons, "rb") as lines:
        while waiting:
            for pid, rank in list(waiting.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                del waiting[pid]
                code = os.waitstatus_to_exitcode(status)
                if code == 0 or reason:
                    continue
                text = (lines.read() or b"").decode(errors="replace").strip()
                reason = text.partition("\n")[0] or f"rank {rank} failed: {_words_for(code)}"
                for other in waiting:
                    os.kill(other, signal.SIGKILL)
            time.sleep(PROBE_PAUSE_S)
    return reason
