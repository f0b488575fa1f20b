"""A coordinator process: core, actor, gRPC server and admin port on one event loop.

Sessions are served first: after a crash, ranks and gateways wait for them. SIGTERM or SIGINT ends
the sessions and the process; ranks keep serving under their leases, and the next coordinator learns
everything from their hellos.
"""

import asyncio
import contextlib
import gc
import json
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any

import structlog

from coordinator.admin.key import AdminKeys
from coordinator.core.core import Core
from coordinator.model.events import CellDrains
from coordinator.model.settings import core_settings
from coordinator.protocol.cell_tls import cell_tls_of
from coordinator.protocol.config import Config
from coordinator.protocol.config_file import ConfigFile
from coordinator.protocol.tracing import start_tracing
from coordinator.protocol.version import own_version
from coordinator.server.config_reload import ConfigReload
from coordinator.server.core_actor import CoreActor, monotonic_ms
from coordinator.server.observers import observe
from coordinator.server.policy_files import ObservationLog, read_step_times
from coordinator.server.registry_lease import announcer_of, leave
from coordinator.server.server import CellServer, ListenError
from coordinator.server.spans import SWITCHES_MAX as SPAN_SWITCHES_MAX
from coordinator.server.spans import CellSpans
from coordinator.telemetry.usage_history import UsageHistory

if TYPE_CHECKING:
    from coordinator.admin.port import AdminPort

TICKS_PER_HEARTBEAT = 2
ADMIN_BACKLOG = 128
ID_BYTES = 6

log = structlog.get_logger()


def admin_keys(host: str) -> AdminKeys:
    """Return the environment's admin keys, checked against the address; raises `AdminKeyError`."""
    keys = AdminKeys(os.environ)
    keys.require(host)
    return keys


async def serve(file: ConfigFile, token: str, keys: AdminKeys) -> None:
    """Run until SIGTERM or SIGINT; raises `ListenError` if an address is taken."""
    config = file.config
    coordinator_id = secrets.token_hex(ID_BYTES)
    step_times = read_step_times(config.policy.step_times)
    core = Core(core_settings(config, step_times), coordinator_id, monotonic_ms())
    owner = CoreActor(core, config.coordinator.heartbeat_ms / TICKS_PER_HEARTBEAT, monotonic_ms)
    usage = UsageHistory(config.usage.tenants_max, config.usage.days)
    server = CellServer(owner, token, config.cell.ranks, usage, cell_tls_of(config.cell_tls))
    observers = observe(core, owner, server, config)
    reload = ConfigReload(file, owner)
    tracing = start_tracing(
        config.tracing, "coordinator", version=own_version(), instance=coordinator_id
    )
    spans = None
    if tracing is not None:
        spans = CellSpans(tracing, lambda: core.views.switches(SPAN_SWITCHES_MAX))
        owner.watchers += (spans,)
    policy = config.policy
    owner.on_observation = ObservationLog(
        policy.observation_log, policy.observation_log_bytes_max
    ).write

    def admin() -> "AdminPort":
        # Its modules take as long to import as all others together, and sessions do not need them.
        from coordinator.admin.port import AdminPort

        return AdminPort(core, owner, server, observers, config, coordinator_id, keys, reload)

    with _listener(config.admin.host, config.admin.port) as listener:
        grpc_port = await server.start(config.coordinator.listen)
        _announce(coordinator_id, grpc_port, listener.getsockname()[1])
        leave_fleet = _leaving(core, owner, config, grpc_port)
        await _run(owner, server, admin, listener, leave_fleet, reload)
    if tracing is not None and spans is not None:
        spans.close()
        tracing.close()
    log.info("coordinator_stopped")


Leave = Callable[[], Awaitable[None]]


def _leaving(core: Core, owner: CoreActor, config: Config, grpc_port: int) -> Leave | None:
    """Announce the cell, and return the function by which it leaves; None without a fleet."""
    if not config.fleet.is_on:
        return None
    announcer = announcer_of(config, grpc_port)
    if announcer is not None:
        announcer.start()

    def unfinished() -> int:
        tasks: Any = core.views.queue()["tasks"]
        return sum(tasks.values())

    async def go() -> None:
        await owner.post(CellDrains())
        await leave(announcer, unfinished)

    return go


async def _run(
    owner: CoreActor,
    server: CellServer,
    admin: Callable[[], "AdminPort"],
    listener: socket.socket,
    leave_fleet: Leave | None,
    reload: ConfigReload,
) -> None:
    """Serve until a signal; an error of the core ends the process, and a fresh one takes over."""
    leaving: list[asyncio.Future[None]] = []
    stopping = asyncio.Event()

    def on_signal() -> None:
        if leave_fleet is None or leaving:
            stopping.set()
            return
        leaving.append(asyncio.ensure_future(leave_fleet()))
        leaving[0].add_done_callback(lambda _: stopping.set())

    owning = asyncio.create_task(owner.run())
    serving = asyncio.create_task(_serve_admin(admin, listener, stopping))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, reload.ask)
    reloading = asyncio.create_task(reload.run())
    try:
        await asyncio.wait((owning, serving), return_when=asyncio.FIRST_COMPLETED)
        if owning.done():
            owning.result()
        serving.result()
    finally:
        stopping.set()
        reloading.cancel()
        await server.stop()
        owning.cancel()
        await asyncio.gather(owning, serving, reloading, return_exceptions=True)


async def _serve_admin(
    make: Callable[[], "AdminPort"], listener: socket.socket, stopping: asyncio.Event
) -> None:
    """Create the admin port and serve it; earlier callers wait in the listener's queue."""
    admin = await asyncio.to_thread(make)
    gc.collect()
    gc.freeze()
    if stopping.is_set():
        return
    serving = asyncio.create_task(admin.serve(listener))
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    admin.stop()
    await serving


@contextlib.contextmanager
def _listener(host: str, port: int) -> Generator[socket.socket, None, None]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            # From here on callers wait, instead of being refused, until the server accepts them.
            listener.listen(ADMIN_BACKLOG)
        except OSError as error:
            raise ListenError(
                f"the admin port cannot listen on {host}:{port} ({error.strerror}): set admin.host "
                "and admin.port to a free address."
            ) from error
        yield listener


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
