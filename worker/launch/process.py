"""One rank's process: builds the engine, runs the loop, and cleans up.

Started by `worker.launch.launcher` in a fork that has already imported vLLM.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import structlog

from coordinator.protocol.cell_tls import cell_tls_of
from coordinator.protocol.config import Config, shared_token
from coordinator.protocol.messages.rank import RankDown
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.tracing import start_tracing
from worker.engine.codec import OutputCodec
from worker.engine.config import EngineConfig
from worker.engine.device import freeze_objects
from worker.engine.lasting_weights import forget_weights
from worker.engine.rank_engine import RankEngine, settle_environment
from worker.io.session import Inbox, RankSession
from worker.io.token_publisher import TokenPublisher
from worker.launch.peer_failure import Loss, PeerFailure
from worker.launch.watchdog import Progress, abort_formation, watch
from worker.rank.core import RankCore
from worker.rank.loop import RankLoop
from worker.rank.runtime import GroupRuntime
from worker.rank.step_times import width_times
from worker.rank.traced_tasks import TracedTasks
from worker.spec import RankSpec

log = structlog.get_logger()

GIL_SWITCH_S = 0.0001
"""Maximum time that the stepping thread keeps the session's thread waiting.

Python's default of 5 ms would be most of a switch.
"""

STEPS_LIMIT = 20
"""A main loop is stuck after this many of its longest steps without a pass."""


def announce(event: str, **fields: object) -> None:
    """Print one JSON line for the process that started the worker; ranks' lines do not mix."""
    os.write(sys.stdout.fileno(), (json.dumps({"event": event, **fields}) + "\n").encode())


def build_engine(base: EngineConfig, spec: RankSpec) -> RankEngine:
    """Build a rank's engine and announce the progress."""
    rank = spec.rank

    def progress(stage: str, done: int, total: int) -> None:
        announce("rank_progress", rank=rank, stage=stage, done=done, total=total)

    started = time.monotonic()
    if spec.crashed:
        forget_weights(spec.lasting, rank)
    try:
        engine = RankEngine(base, spec, progress)
    except Exception:
        # Weights of a predecessor may be the reason, and would be for the next process, too.
        forget_weights(spec.lasting, rank)
        raise
    log.info(
        "rank_built",
        rank=rank,
        seconds=round(time.monotonic() - started, 2),
        pages=engine.kv.num_pages,
        loaded_bytes=engine.loaded_bytes,
        **dict(engine.memory()),
        **engine.communicator_ms(),
    )
    return engine


def longest_step_s(engine: RankEngine) -> float:
    """Return the longest step measured at start-up, in seconds; the largest step is among them."""
    points = (
        us
        for times in engine.step_times()
        for _, curve in width_times(times).curves
        for _, us in curve
    )
    return max(points, default=0) / 1e6


def serve_rank(
    config: Config,
    base: EngineConfig,
    spec: RankSpec,
    incarnation: int,
    on_ready: Callable[[], None],
    beat: Callable[[int], None],
) -> None:
    """Run a rank until it is asked to stop.

    Calls `on_ready` once it can serve, and `beat` with its passes repeatedly from then on.
    """
    rank = spec.rank
    structlog.contextvars.bind_contextvars(rank=rank)
    sys.setswitchinterval(GIL_SWITCH_S)
    engine = build_engine(base, spec)
    inbox: Inbox = Inbox()
    participant = SwitchParticipant(rank, incarnation)

    def abort(lost: Loss) -> None:
        abort_formation(lost, engine.communicators, loss.degraded_binding)

    is_degraded = threading.Event()

    def heard(message: RankDown) -> None:
        if (binding := loss.heard(message)) is not None:
            # The session's thread must not wait: the watchdog does the slow part.
            engine.communicators.abort(binding.group.ranks, binding.formation)
            is_degraded.set()

    heartbeat_s = config.coordinator.heartbeat_ms / 1e3
    lease_s = config.coordinator.lease_ms / 1e3
    token, tls = shared_token(), cell_tls_of(config.cell_tls)
    session = RankSession(config.coordinator.listen, token, heartbeat_s, lease_s, inbox, heard, tls)
    publisher = TokenPublisher(OutputCodec().frames, session.tell_links, token)
    tracing = start_tracing(config.tracing, "rank", instance=f"{rank}-{incarnation}")
    runtime = GroupRuntime(engine, incarnation, publisher)
    if tracing is not None:
        runtime.book = TracedTasks(tracing, rank)
    limit_s = max(config.cell.step_limit_ms / 1e3, STEPS_LIMIT * longest_step_s(engine))
    # Where collectives can raise by themselves, a rank may take as long as its step does.
    stuck_s = limit_s if engine.communicators.can_abort else config.cell.stuck_after_ms / 1e3
    loss = PeerFailure(participant, stuck_s, lambda: runtime.steps.draining_groups)
    probes = config.cell.probe_after_switch
    core = RankCore(engine, runtime, participant, heartbeat_s, probes_after_switch=probes)
    loop = RankLoop(core, session, inbox, publisher.watch)

    def stop(number: int, _frame: object) -> None:
        core.stop_reason = signal.Signals(number).name

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settle_environment()
    freeze_objects()
    watch(loss, Progress(lambda: loop.passes, limit_s), abort, beat, is_degraded)
    announce("rank_progress", rank=rank, stage="ready", done=1, total=1)
    on_ready()
    try:
        loop.run()
    except BaseException:
        engine.distrust()
        raise
    finally:
        session.close()
        publisher.close()
        if tracing is not None:
            tracing.close()
    log.info("rank_stopped", reason=core.stop_reason)
