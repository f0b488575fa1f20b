"""A coordinator process from start to end: core, owner, gRPC server and admin port on one loop.

SIGTERM or SIGINT ends the sessions and the process; ranks go on serving under their leases, and the
next coordinator learns everything from their hellos.
"""

import asyncio
import contextlib
import gc
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Generator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import structlog
import uvicorn

from coordinator.admin import AdminContext, build_admin
from coordinator.admin_guard import ADMIN_KEY_ENV, AdminGuard, require_key
from coordinator.announcing import announcer_of, leave
from coordinator.cell_spans import SWITCHES_LOOKED_AT, CellSpans
from coordinator.core import Core
from coordinator.events import CellDrains
from coordinator.history import INTERVAL_S, History
from coordinator.metrics import Facts, Metrics, Views
from coordinator.owner import CoreOwner, monotonic_ms
from coordinator.policy_files import ObservationLog, read_step_times
from coordinator.protocol.config import Config
from coordinator.protocol.messages import Carry
from coordinator.protocol.tracing import start_tracing
from coordinator.server import CellServer, ListenError
from coordinator.settings import core_settings

TICKS_PER_HEARTBEAT = 2
ADMIN_CONNECTIONS_MAX = 128
ADMIN_BACKLOG = 128
ADMIN_KEEP_ALIVE_S = 65
ADMIN_SHUTDOWN_S = 1
ADMIN_HEADER_BYTES_MAX = 32 * 1024
ID_BYTES = 6

log = structlog.get_logger()


def admin_key(host: str) -> str:
    """Return the admin key of the environment, checked against the address; may be empty."""
    key = os.environ.get(ADMIN_KEY_ENV, "")
    require_key(host, key)
    return key


async def serve(config: Config, token: str, key: str) -> None:
    """Run until SIGTERM or SIGINT; raises `ListenError` if an address is taken."""
    coordinator_id = secrets.token_hex(ID_BYTES)
    step_times = read_step_times(config.policy.step_times)
    core = Core(core_settings(config, step_times), coordinator_id, monotonic_ms())
    owner = CoreOwner(core, config.coordinator.heartbeat_ms / TICKS_PER_HEARTBEAT, monotonic_ms)
    server = CellServer(owner, token, config.cell.ranks)
    metrics = build_metrics(core, owner, server, config)
    history = History(server.gathered.tally)
    tracing = start_tracing(
        config.tracing, "coordinator", version=own_version(), instance=coordinator_id
    )
    spans = None
    if tracing is not None:
        spans = CellSpans(tracing, lambda: core.switches_view(SWITCHES_LOOKED_AT))
        owner.watchers += (spans,)
    policy = config.policy
    owner.on_observation = ObservationLog(
        policy.observation_log, policy.observation_log_bytes_max
    ).write
    context = AdminContext(
        core=core,
        owner=owner,
        metrics=metrics,
        history=history,
        clock=monotonic_ms,
        world=config.cell.ranks,
        widths=config.cell.widths,
        default_carry=Carry(config.coordinator.default_carry),
        facts=_facts(config, coordinator_id),
    )
    with _listener(config.admin.host, config.admin.port) as listener:
        grpc_port = await server.start(config.coordinator.listen)
        admin = _AdminServer(build_admin(context, key))
        gc.collect()
        gc.freeze()
        _announce(coordinator_id, grpc_port, listener.getsockname()[1])
        sampling = asyncio.create_task(_sample(core, metrics, history))
        await _run(owner, server, admin, listener, _leaving(core, owner, config, grpc_port))
        sampling.cancel()
    if tracing is not None and spans is not None:
        spans.close()
        tracing.close()
    log.info("coordinator_stopped")


def build_metrics(core: Core, owner: CoreOwner, server: CellServer, config: Config) -> Metrics:
    """Return the metrics of a cell, which see what the owner hands to the core."""
    views = Views(
        layout=core.layout_view,
        ranks=lambda: core.ranks_view(monotonic_ms()),
        queue=core.queue_view,
        switches=core.switches_view,
        clock=monotonic_ms,
    )
    facts = Facts(config.served_model_name, own_version(), config.slo)
    metrics = Metrics(views, server.gathered, facts)
    owner.on_switch = metrics.switch_ended
    owner.watchers = (metrics.watcher,)
    if config.policy.name == "adaptive":
        owner.watchers += (metrics.came_true,)
    return metrics


async def _sample(core: Core, metrics: Metrics, history: History) -> None:
    """Keep what the live page shows of the last minutes."""
    while True:
        try:
            now_ms = monotonic_ms()
            metrics.watcher.settle(now_ms)
            ranks: Any = core.ranks_view(now_ms)["ranks"]
            views = core.layout_view(), ranks, core.queue_view()
            history.take(*views, now_ms=now_ms, wall_s=time.time())
        except Exception:
            # What only looks on must not end a coordinator that works.
            log.exception("sample_failed")
        await asyncio.sleep(INTERVAL_S)


Leave = Callable[[], Awaitable[None]]


def _leaving(core: Core, owner: CoreOwner, config: Config, grpc_port: int) -> Leave | None:
    """Say that the cell is there, and return how it leaves; None if it is alone."""
    if not config.fleet.is_on:
        return None
    announcer = announcer_of(config, grpc_port)
    if announcer is not None:
        announcer.start()

    def unfinished() -> int:
        tasks: Any = core.queue_view()["tasks"]
        return sum(tasks.values())

    async def go() -> None:
        await owner.post(CellDrains())
        await leave(announcer, unfinished)

    return go


async def _run(
    owner: CoreOwner,
    server: CellServer,
    admin: "_AdminServer",
    listener: socket.socket,
    leave_fleet: Leave | None,
) -> None:
    """Serve until a signal; a broken core ends everything, so that a fresh one takes over."""
    leaving: list[asyncio.Future[None]] = []

    def on_signal() -> None:
        if leave_fleet is None or leaving:
            admin.stop()
            return
        leaving.append(asyncio.ensure_future(leave_fleet()))
        leaving[0].add_done_callback(lambda _: admin.stop())

    owning = asyncio.create_task(owner.run())
    serving = asyncio.create_task(admin.serve(sockets=[listener]))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await asyncio.wait((owning, serving), return_when=asyncio.FIRST_COMPLETED)
        if owning.done():
            owning.result()
        serving.result()
    finally:
        admin.stop()
        await server.stop()
        owning.cancel()
        await asyncio.gather(owning, serving, return_exceptions=True)


class _AdminServer(uvicorn.Server):
    """Uvicorn without signal handlers of its own."""

    def __init__(self, app: AdminGuard) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=ADMIN_CONNECTIONS_MAX,
                timeout_keep_alive=ADMIN_KEEP_ALIVE_S,
                timeout_graceful_shutdown=ADMIN_SHUTDOWN_S,
                h11_max_incomplete_event_size=ADMIN_HEADER_BYTES_MAX,
            )
        )

    def stop(self) -> None:
        """End soon."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process."""
        yield


@contextlib.contextmanager
def _listener(host: str, port: int) -> Generator[socket.socket, None, None]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            # From here on callers are kept waiting, not refused, until the server accepts them.
            listener.listen(ADMIN_BACKLOG)
        except OSError as error:
            raise ListenError(
                f"the admin port cannot listen on {host}:{port} ({error.strerror}): set admin.host "
                "and admin.port to a free address."
            ) from error
        yield listener


def own_version() -> str:
    """Return the version that is installed."""
    try:
        return version("aileron")
    except PackageNotFoundError:
        return "not installed"


def _facts(config: Config, coordinator_id: str) -> dict[str, Any]:
    return {
        "version": own_version(),
        "coordinator": coordinator_id,
        "pid": os.getpid(),
        "model": config.served_model_name,
        "device": config.cell.device,
        "policy": config.policy.name,
        "default_carry": config.coordinator.default_carry,
    }


def _announce(coordinator_id: str, grpc_port: int, admin_port: int) -> None:
    """Print one line of JSON on stdout: sessions are accepted from now on."""
    facts = {
        "event": "coordinator_ready",
        "coordinator": coordinator_id,
        "grpc_port": grpc_port,
        "admin_port": admin_port,
        "pid": os.getpid(),
    }
    print(json.dumps(facts), flush=True)
