"""A gateway process from start to end: builds the parts, serves, drains, stops.

Called by `python -m gateway`. The first SIGTERM or SIGINT makes the gateway unready and lets open
streams finish within `DRAIN_S`; the second one ends the process immediately.
"""

import asyncio
import contextlib
import json
import os
import resource
import secrets
import signal
import socket
import tempfile
from collections.abc import Awaitable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import structlog
import uvicorn

from coordinator.protocol.cache_salt import CacheSalts
from coordinator.protocol.certificate import certificate_of
from coordinator.protocol.config_file import ConfigFile
from coordinator.protocol.gateway_config import GatewayConfig
from coordinator.protocol.messages.gateway import BatchesRun, BatchProgress
from coordinator.protocol.terms import Tier
from coordinator.protocol.tracing import start_tracing
from gateway.admission.keyring import KeyRing
from gateway.admission.rates import RateLimits
from gateway.admission.shared_idempotency import SharedIdempotencyCache
from gateway.admission.shared_storage import SharedStorage
from gateway.admission.sibling_answers import SiblingAnswers
from gateway.batches.api import batch_routes
from gateway.batches.setup import set_up_batches
from gateway.config_reload import ConfigReload, targets_of
from gateway.engine import app as vllm_app
from gateway.engine import grammar, wire
from gateway.engine.sandbox import ForkServer, Sandbox
from gateway.errors import api_error
from gateway.http.connection import Connection, ConnectionLimits
from gateway.http.edge import Edge, EdgeLimits
from gateway.http.line_call import LineAnswer, LineCall
from gateway.http.routes import Readiness, add_own_routes, close_other_routes
from gateway.http.server import Server, renew
from gateway.http.spans import RequestSpans, TaskSpans
from gateway.prefork import Announce, PreforkServer
from gateway.relay.cell_sessions import set_up_fleet
from gateway.relay.relay import Relay
from gateway.sockets import Inbox, Sockets, listen
from gateway.telemetry.engine_metrics import engine_families
from gateway.telemetry.meter import RequestMeter
from gateway.telemetry.metrics_publisher import MetricsPublisher
from gateway.telemetry.own_metrics import GatewayState, MetricsServer, OwnMetrics
from gateway.telemetry.request_log import RequestLog

DRAIN_S = 30.0
"""Longest time that open streams go on after the first SIGTERM."""

TICK_S = 0.25
FLUSH_S = 1.0
"""Longest time for the last messages to reach the coordinator."""

SHUTDOWN_S = 1
"""Seconds that uvicorn waits for answers still open after the drain."""

KEEP_ALIVE_S = 65
"""Longest idle time of a connection; above the usual 60 s of a load balancer in front."""

BACKLOG = 4_096
"""Connections that the kernel queues until they are accepted."""

FILES_SPARE = 512
"""File descriptors reserved for everything but client connections."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger(__name__)


class Gateway:
    """The parts of a running gateway."""

    def __init__(
        self,
        file: ConfigFile,
        token: str,
        run_dir: Path,
        listener: socket.socket,
        announce: Announce,
        answers: Path | None = None,
    ) -> None:
        """Bind the token socket and connect the parts; call it in the event loop.

        `answers` is the file of answers that this process shares with siblings.
        """
        self._config = config = file.config
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._tracing = tracing = start_tracing(config.tracing, "gateway", instance=name)
        self._spans = RequestSpans(tracing) if tracing is not None else None
        self._listener = listener
        self._print_line = announce
        ranks_token = token if config.cell_tls.cert_file else ""
        self._sockets = Sockets(run_dir, config.gateway.token_listen, ranks_token)
        self._meter = RequestMeter(targets_of(config.slo), config.usage.tenants_max)
        self._request_log = RequestLog(config.log, config.served_model_names)
        self._reload = ConfigReload(file, self._meter, self._request_log)
        self._fleet = set_up_fleet(config, token, name, self._meter.registry_away)
        self._publisher = MetricsPublisher(self._fleet, self._meter, engine_families)
        self._relay = Relay(
            self._fleet,
            self._take_outputs,
            gateway=name,
            reply_to=self._sockets.token_address,
            meter=self._meter,
            spans=None if tracing is None else TaskSpans(tracing, config.served_model_name),
            answer_call=self._sockets.send_outputs,
            cells=self._fleet.cells,
        )
        self._llm: vllm_app.RelayedLLM | None = None
        self._keys = KeyRing(config.gateway.keys_file)
        self._certificate = certificate_of(
            "gateway", config.gateway.tls_cert_file, config.gateway.tls_key_file
        )
        url = config.gateway.rate_limit_storage
        storage = SharedStorage(url, away=self._meter.storage_away)
        siblings = None if answers is None else SiblingAnswers(answers)
        self._rates, self._replays = RateLimits(storage), SharedIdempotencyCache(storage, siblings)
        own_caches = config.gateway.keys_file and not config.gateway.share_prefix_cache
        self._salts = CacheSalts(token) if own_caches else None
        self._batches = set_up_batches(config.batches, name, self._answer_line)
        self._published_batches: tuple[BatchProgress, ...] = ()
        self._edge: Edge | None = None
        self._server: uvicorn.Server | None = None
        self._drain: asyncio.Task[None] | None = None
        self._bug: BaseException | None = None
        self._own_metrics = OwnMetrics(TICK_S)
        self._connections_max = 0

    async def run(self, front_end: vllm_app.FrontEndConfig, fork_server: ForkServer) -> None:
        """Serve until a signal arrives."""
        metrics_server = self._serve_metrics()
        sandbox = Sandbox(fork_server)
        self._sockets.send_ready(wire.ready_frame(front_end.vllm))
        inboxes = (
            Inbox(self._sockets.requests, self._relay.front_end_called),
            Inbox(self._sockets.tokens, self._relay.on_tokens),
        )
        app, llm = await vllm_app.build_front_end(
            front_end,
            self._relay.on_front_end_message,
            input_address=self._sockets.input_address,
            output_address=self._sockets.output_address,
            salts=self._salts,
        )
        self._llm = llm
        llm.use_sandbox(sandbox)
        close_other_routes(app)
        add_own_routes(app, self.readiness)
        app.router.routes += batch_routes(self._batches)
        limits, spans = _edge_limits(self._config.gateway), self._spans
        self._edge = Edge(
            app,
            self._keys,
            self._rates,
            limits,
            self._meter,
            spans,
            self._replays,
            self._request_log,
        )
        self._server = self._serving(self._edge)
        self._handle_signals()
        work = [
            asyncio.create_task(self._fleet.run(self._relay)),
            asyncio.create_task(self._tick(llm)),
            asyncio.create_task(_forever(self._keys.watch())),
            asyncio.create_task(self._reload.run()),
        ]
        if self._certificate is not None:
            work.append(asyncio.create_task(renew(self._certificate)))
        if self._batches is not None:
            desk = self._batches.desk
            work.append(asyncio.create_task(desk.run(self._is_ready, self._publish_batches)))
        for task in work:
            task.add_done_callback(self._work_ended)
        try:
            await self._server.serve(sockets=[self._listener])
            await self._flush()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            if self._batches is not None:
                await self._batches.desk.close()
                await self._batches.store.close()
            await self._replays.close()
            if metrics_server is not None:
                await asyncio.to_thread(metrics_server.close)
            llm.shutdown()
            sandbox.close()
            for inbox in inboxes:
                inbox.close()
            self._sockets.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
        log.info("gateway_stopped")
        if self._bug is not None:
            raise self._bug

    def _serve_metrics(self) -> MetricsServer | None:
        gateway = self._config.gateway
        if not gateway.metrics_listen:
            return None
        return self._own_metrics.serve(gateway.metrics_listen, gateway.processes)

    def _state(self) -> GatewayState:
        """Return what this process's own metrics show."""
        assert self._edge is not None, "ticks begin after the edge exists."
        assert self._server is not None, "ticks begin after the server exists."
        gateway = self._config.gateway
        return GatewayState(
            is_ready=self._is_ready(),
            is_draining=self._edge.draining,
            open_requests=self._edge.requests,
            open_requests_max=max(1, gateway.requests_max // gateway.processes),
            connections=len(self._server.server_state.connections),
            connections_max=self._connections_max,
            cells=len(self._fleet.cells.up),
            keys=self._keys.count,
            keys_are_outdated=self._keys.is_outdated,
            batches=len(self._published_batches),
            requests=self._meter.requests(),
        )

    def _serving(self, edge: Edge) -> Server:
        gateway = self._config.gateway
        wanted = max(1, gateway.connections_max // gateway.processes)
        self._connections_max = _connections_max(wanted)
        limits = ConnectionLimits(self._connections_max, gateway.connections_per_address_max)
        return Server(
            self._announce,
            uvicorn.Config(
                edge,
                http=cast(type[Connection], partial(Connection, limits=limits)),
                backlog=BACKLOG,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                lifespan="on",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_S,
            ),
            self._certificate,
        )

    def readiness(self) -> Readiness:
        """Return whether a request that arrives now can be served."""
        cell = self._relay.cell
        if self._edge is None or self._edge.draining:
            return _unready("draining", "This server is shutting down: send the request again.")
        if not self._fleet.cells.up:
            return _unready(
                "no_healthy_workers",
                "There is no session with the coordinator: check that it runs.",
            )
        if cell is None:
            return _unready("not_serving", "The coordinator has not reported the cell's state yet.")
        if not cell.serving:
            text = f"The cell serves no layout: {cell.ranks_alive} of {cell.world} ranks are alive."
            return _unready("not_serving", text)
        return Readiness(ready=True, layout=cell.layout, epoch=cell.epoch)

    def _take_outputs(self, frames: Sequence[bytes]) -> None:
        assert self._llm is not None, "there are no tasks before there is a front end."
        self._llm.take_outputs(frames)

    def _is_ready(self) -> bool:
        return self.readiness().ready

    async def _answer_line(self, call: LineCall) -> LineAnswer:
        assert self._edge is not None, "batches begin after the edge exists."
        return await self._edge.answer_line(call)

    def _publish_batches(self, batches: Sequence[BatchProgress]) -> None:
        """Publish the running batches repeatedly, and once after the last one."""
        if batches or self._published_batches:
            self._fleet.broadcast(BatchesRun(tuple(batches)))
        self._published_batches = tuple(batches)

    def _announce(self) -> None:
        """Announce in one line of JSON that requests are accepted from now on."""
        host, port = self._listener.getsockname()[:2]
        facts = {
            "event": "gateway_ready",
            "url": f"{self._config.gateway.scheme}://{f'[{host}]' if ':' in host else host}:{port}",
            "host": host,
            "port": port,
            "token_address": self._sockets.token_address,
            "model": self._config.served_model_name,
            "pid": os.getpid(),
        }
        self._print_line(json.dumps(facts))

    async def _tick(self, llm: vllm_app.RelayedLLM) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._relay.tick()
            self._publisher.tick()
            self._own_metrics.tick(self._state())
            self._fleet.hold_out(self._reload.files(self._keys.warning))
            if llm.errored:
                raise RuntimeError("vLLM's front end has stopped: see the log above.")

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        """Shut down: a gateway without its session or its clock is useless, a new one is not."""
        if not task.cancelled() and self._server is not None:
            self._bug = task.exception()
            log.error("gateway_broken", reason=repr(self._bug))
            self._server.should_exit = True

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload.ask)

    def _on_signal(self, number: int) -> None:
        assert self._edge is not None
        if self._edge.draining:
            log.warning("gateway_killed", signal=number)
            os._exit(128 + number)
        self._edge.draining = True
        log.info("gateway_draining", requests=self._edge.requests, limit_s=DRAIN_S)
        self._drain = asyncio.create_task(self._drain_requests())

    async def _drain_requests(self) -> None:
        assert self._edge is not None
        assert self._server is not None
        if self._batches is not None:
            await self._batches.desk.close()
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._edge.idle.wait()
        except TimeoutError:
            self._relay.give_up(
                api_error("draining", "This server had to shut down: send the request again.")
            )
        self._server.should_exit = True

    async def _flush(self) -> None:
        self._publisher.publish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._fleet.flush()


def _edge_limits(config: GatewayConfig) -> EdgeLimits:
    return EdgeLimits(
        requests_max=max(1, config.requests_max // config.processes),
        body_bytes_max=config.body_bytes_max,
        media_domains=frozenset(config.media_domains),
        objectives={name: Tier[tier.upper()] for name, tier in config.objectives.items()},
    )


def _connections_max(wanted: int) -> int:
    """Return the connections this process has file descriptors for, at most `wanted`."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = max(files - FILES_SPARE, 1)
    if possible < wanted:
        log.warning("connections_bounded_by_files", connections=possible, wanted=wanted)
    return min(wanted, possible)


async def _forever(work: Awaitable[None]) -> None:
    """Await work that may return early, and never return."""
    await work
    await asyncio.Event().wait()


def _unready(code: str, reason: str) -> Readiness:
    return Readiness(ready=False, reason=api_error(code, reason))


async def _run(
    file: ConfigFile,
    token: str,
    front_end: vllm_app.FrontEndConfig,
    fork_server: ForkServer,
    listener: socket.socket,
    announce: Announce,
    answers: Path | None,
) -> None:
    folder = file.config.run_dir or None
    with tempfile.TemporaryDirectory(prefix="gateway-", dir=folder) as run_dir:
        gateway = Gateway(file, token, Path(run_dir), listener, announce, answers)
        await gateway.run(front_end, fork_server)


def _run_loop(loop: str, work: Coroutine[None, None, None]) -> None:
    if loop == "uvloop":
        import uvloop

        uvloop.run(work)
    else:
        asyncio.run(work)


def serve(file: ConfigFile, token: str) -> int:
    """Run a gateway; return its exit code.

    Raises ValueError or OSError with a sentence if it cannot start.
    """
    config = file.config
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    front_end = vllm_app.configure(
        config.model.path,
        config.served_model_names,
        config.model.engine_args,
        config.gateway.media_domains,
    )
    gateway = config.gateway

    def say(line: str) -> None:
        print(line, flush=True)

    def run(announce: Announce, host: str, port: int, answers: Path | None = None) -> None:
        # Fork before threads and sockets exist, so that no child inherits any.
        fork_server = ForkServer(partial(grammar.prepare, front_end.vllm), grammar.COMPILE_S)
        own = listen(host, port, shared=answers is not None)
        _run_loop(gateway.loop, _run(file, token, front_end, fork_server, own, announce, answers))

    if gateway.processes == 1:
        run(say, gateway.host, gateway.port)
        return 0
    # Detect another server on the port before the children share it.
    with listen(gateway.host, gateway.port) as probe:
        host, port = probe.getsockname()[:2]
    # This socket never listens. It keeps the port reserved while children restart.
    keeper = listen(host, port, shared=True)

    with tempfile.TemporaryDirectory(prefix="gateways-", dir=config.run_dir or None) as folder:

        def run_one(announce: Announce) -> None:
            keeper.close()
            run(announce, host, port, Path(folder) / "answers.sqlite")

        return PreforkServer(gateway.processes, run_one).run(say)
