"""The admin port of a coordinator process: API, metrics, history and their HTTP server.

Created while sessions are served already; see `coordinator.process`.
"""

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Generator
from typing import Any

import structlog
import uvicorn

from coordinator.admin.app import AdminContext, build_admin
from coordinator.admin.key import AdminKeys
from coordinator.core.core import Core
from coordinator.protocol.certificate import (
    CHECK_EVERY_S,
    ServerCertificate,
    certificate_of,
)
from coordinator.protocol.config import Config
from coordinator.protocol.terms import Carry
from coordinator.protocol.version import own_version
from coordinator.server.config_reload import ConfigReload
from coordinator.server.core_actor import CoreActor, monotonic_ms
from coordinator.server.observers import Observers
from coordinator.server.server import CellServer
from coordinator.telemetry.history import INTERVAL_S, History
from coordinator.telemetry.metrics import Facts, Metrics, Views

CONNECTIONS_MAX = 128
KEEP_ALIVE_S = 65
SHUTDOWN_S = 1
HEADER_BYTES_MAX = 32 * 1024

log = structlog.get_logger()


class AdminPort:
    """Answers operators and Prometheus; created in any thread, served on the actor's loop."""

    def __init__(
        self,
        core: Core,
        owner: CoreActor,
        server: CellServer,
        observers: Observers,
        config: Config,
        coordinator_id: str,
        keys: AdminKeys,
        reload: ConfigReload,
    ) -> None:
        self._core = core
        self._metrics = build_metrics(core, server, observers, config)
        reload.on_change = lambda new: self._metrics.show_goals(new.slo)
        self._history = History(server.aggregator.tally)
        admin = config.admin
        self._certificate = certificate_of("admin", admin.tls_cert_file, admin.tls_key_file)
        context = AdminContext(
            core=core,
            owner=owner,
            metrics=self._metrics,
            history=self._history,
            clock=monotonic_ms,
            world=config.cell.ranks,
            widths=config.cell.widths,
            default_carry=Carry(config.coordinator.default_carry),
            facts=_facts(config, coordinator_id),
            usage=server.aggregator.usage,
            reload=reload,
            started_s=time.time(),
        )
        self._server = _Server(
            uvicorn.Config(
                build_admin(context, keys),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS_MAX,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_S,
                h11_max_incomplete_event_size=HEADER_BYTES_MAX,
                ssl_context_factory=None if self._certificate is None else self._context,
            )
        )

    async def serve(self, listener: socket.socket) -> None:
        """Answer until `stop`."""
        work = [asyncio.create_task(self._sample())]
        if self._certificate is not None:
            work.append(asyncio.create_task(self._renew(self._certificate)))
        try:
            await self._server.serve(sockets=[listener])
        finally:
            for each in work:
                each.cancel()

    def stop(self) -> None:
        """End soon."""
        self._server.should_exit = True

    def _context(self, *_: object) -> ssl.SSLContext:
        assert self._certificate is not None, "uvicorn calls this only for HTTPS."
        return self._certificate.context

    async def _renew(self, certificate: ServerCertificate) -> None:
        """Take the certificate's files again whenever they change."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if await asyncio.to_thread(certificate.has_changed):
                certificate.follow()

    async def _sample(self) -> None:
        """Take samples for the live page's history."""
        core = self._core
        while True:
            try:
                now_ms = monotonic_ms()
                self._metrics.watcher.settle(now_ms)
                ranks: Any = core.views.ranks(now_ms)["ranks"]
                self._history.take(
                    layout=core.views.layout(),
                    ranks=ranks,
                    queue=core.views.queue(),
                    now_ms=now_ms,
                    wall_s=time.time(),
                )
            except Exception:
                # An observer must not end a working coordinator.
                log.exception("sample_failed")
            await asyncio.sleep(INTERVAL_S)


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process."""
        yield


def build_metrics(core: Core, server: CellServer, observers: Observers, config: Config) -> Metrics:
    """Return the metrics of a cell."""
    views = Views(
        layout=core.views.layout,
        ranks=lambda: core.views.ranks(monotonic_ms()),
        queue=core.views.queue,
        decisions=core.views.decisions,
        clock=monotonic_ms,
        alternation=core.views.alternation,
    )
    facts = Facts(config.served_model_name, own_version(), config.slo, config.usage.tenant_metric)
    return Metrics(views, server.aggregator, observers.core, observers.prediction_tracker, facts)


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
