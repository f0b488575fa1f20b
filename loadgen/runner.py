"""One whole run: find the model, plan, warm up, pace the requests, and build the report.

The shell around the pure parts: it owns the clock, the HTTP session, the signals and the
progress line. Ctrl-C or SIGTERM stops the run and still gives a report of what happened.
"""

import asyncio
import contextlib
import resource
import secrets
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import aiohttp
from rich.console import Console

from loadgen.advice import warnings_for
from loadgen.arrivals import plan_arrivals
from loadgen.client import Client, Target, open_session
from loadgen.config import ClosedLoad, OpenLoad, RunConfig
from loadgen.environment import describe_environment
from loadgen.errors import UsageError
from loadgen.loops import Bench, run_closed, run_open
from loadgen.meter import Meter
from loadgen.payload import BodyStyle, request_body
from loadgen.plan import PlannedRequest, plan_closed, plan_open
from loadgen.progress import show_progress
from loadgen.report import SCHEMA, SCHEMA_VERSION, Finished, build_report

DISCOVERY_TIMEOUT_S = 10.0
SPARE_FILES = 64


@dataclass(frozen=True, slots=True)
class Server:
    """What the server said about itself before the run."""

    model: str
    models: tuple[str, ...]
    version: str | None


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The finished run, what it ran against and when it began."""

    finished: Finished
    server: Server
    run_id: str
    started_at: datetime
    warmup_failures: int


async def run_load(config: RunConfig, headers: dict[str, str]) -> dict[str, object]:
    """Carry out the run and return its report, still without command and raw options."""
    allow_open_files(_most_in_flight(config.load))
    async with open_session(headers) as session:
        server = await discover(session, config)
        outcome = await _run(session, config, server)
    return _report(config, outcome)


async def discover(session: aiohttp.ClientSession, config: RunConfig) -> Server:
    """Ask the server for its models; refuse to start where there is none to talk to."""
    url = f"{config.url}/v1/models"
    try:
        status, body = await _get_json(session, url)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise UsageError(f"No OpenAI-compatible server answers at {url}: {reason}.") from error
    listed = body.get("data") if isinstance(body, dict) else None
    models = tuple(
        str(entry["id"])
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and "id" in entry
    )
    if config.model is None and (status != 200 or not models):
        raise UsageError(f"{url} lists no model (status {status}); name one with --model.")
    return Server(config.model or models[0], models, await _version(session, config.url))


async def _run(session: aiohttp.ClientSession, config: RunConfig, server: Server) -> RunOutcome:
    run_id = f"lg{secrets.token_hex(4)}"
    plan = _plan(config, run_id)
    style = BodyStyle(
        config.endpoint, server.model, config.prompt, config.temperature, config.ignore_eos
    )
    target = Target(config.url, config.endpoint, config.timeout_s)
    warmup_failures = await _warm_up(Client.starting_now(session, target, Meter(0)), config, style)

    meter = Meter(len(plan))
    started_at = datetime.now(UTC)
    client = Client.starting_now(session, target, meter)
    bench = Bench(lambda planned: request_body(style, planned), client.send, client.clock, meter)
    shown = _shown_while(meter, bench, quiet=config.outputs.quiet)
    stopped = await _until_stopped(_paced(plan, bench, config.load), shown)
    return RunOutcome(
        _finished(config.load, plan, bench, stopped=stopped),
        server,
        run_id,
        started_at,
        warmup_failures,
    )
