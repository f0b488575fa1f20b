"""One whole run: find the model, plan, warm up, pace the requests, and build the report.

The shell around the pure parts: it owns the clock, the HTTP session, the signals and the progress
line. Ctrl-C or SIGTERM stops the run, which still produces a report.
"""

import asyncio
import contextlib
import json
import resource
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import aiohttp
from rich.console import Console

from loadgen.client.client import Client, Clock, Target, open_session
from loadgen.client.environment import describe_environment
from loadgen.client.loops import Bench, run_closed, run_open
from loadgen.client.meter import Meter
from loadgen.client.overhead import Overhead, OverheadProbe, overhead_as_json, overload_warnings
from loadgen.client.payload import BodyStyle, made_ahead, request_body
from loadgen.client.progress import show_progress
from loadgen.client.switches import SwitchWatch
from loadgen.config import RunConfig
from loadgen.errors import UsageError
from loadgen.report.advice import warnings_for
from loadgen.report.report import SCHEMA, SCHEMA_VERSION, Finished, build_report
from loadgen.workload.arrivals import plan_arrivals
from loadgen.workload.load import ClosedLoad, Load, OpenLoad, TraceLoad
from loadgen.workload.plan import PlannedRequest, digest_of, plan_closed, plan_open, plan_trace
from loadgen.workload.prompts import exchange_of

DISCOVERY_TIMEOUT_S = 10.0
REASON_CHARS_MAX = 200
"""Longest reason of a server that is repeated."""
SPARE_FILES = 64
AHEAD_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of request bodies made before the run; later bodies are made when they are due."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server's own data, read before the run."""

    model: str
    models: tuple[str, ...]
    version: str | None


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The finished run, its server and when it began."""

    finished: Finished
    server: Server
    run_id: str
    started_at: datetime
    warmup_failures: int
    plan_digest: str
    overhead: Overhead
    switches: dict[str, object] | None


async def run_load(
    config: RunConfig, headers: dict[str, str], admin_headers: dict[str, str]
) -> dict[str, object]:
    """Run the load and return its report, without the command and the raw options."""
    allow_open_files(_most_in_flight(config.load) + SPARE_FILES)
    # Two sessions, because neither server may see the other's key.
    async with open_session(headers) as session, open_session(admin_headers) as admin:
        server = await discover(session, config)
        watch = None if config.admin_url is None else SwitchWatch(admin, config.admin_url)
        outcome = await _run(session, config, server, watch)
    return _report(config, outcome)


async def discover(session: aiohttp.ClientSession, config: RunConfig) -> Server:
    """Ask the server for its models; raise UsageError if none answers."""
    url = f"{config.url}/v1/models"
    try:
        status, body = await _get_json(session, url)
    except (aiohttp.ClientError, OSError) as error:
        # aiohttp's own text names a host and a library's object.
        reason = getattr(error, "strerror", None) or str(error) or "no answer in time"
        raise UsageError(f"No server answers at {url}: {reason}.") from error
    models = _model_names(body)
    if config.model is None and not models:
        raise UsageError(
            f"{url} lists no model (status {status}{_reason_in(body)}); name one with --model, or "
            "check --url and the key."
        )
    return Server(config.model or models[0], models, await _version(session, config.url))


def allow_open_files(files: int) -> None:
    """Raise this process's soft limit on open files if needed; UsageError if it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return
    if hard != resource.RLIM_INFINITY and hard < files:
        raise UsageError(
            f"This many requests in flight need {files} open files and the limit is {hard}: "
            "lower --max-in-flight or raise ulimit -n."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def clock_from_now() -> Clock:
    """Return a clock of seconds since this call that never goes back."""
    start_s = time.monotonic()
    return lambda: time.monotonic() - start_s


async def _run(
    session: aiohttp.ClientSession, config: RunConfig, server: Server, watch: SwitchWatch | None
) -> RunOutcome:
    run_id = f"lg{secrets.token_hex(4)}"
    plan, digest = planned_run(config, run_id)
    bench = _bench(session, config, server.model, len(plan))
    failures = await _warm_up(bench, config, run_id)
    probe = OverheadProbe()
    if watch is not None:
        await watch.begin()

    prepare = made_ahead(plan, bench.prepare, AHEAD_BYTES_MAX)
    bench = replace(_bench(session, config, server.model, len(plan)), prepare=prepare)
    started_at = datetime.now(UTC)
    probe.start()
    async with _beside(_observers(bench, probe, watch, quiet=config.outputs.quiet)):
        stopped = await _until_stopped(_paced(plan, bench, config.load))
    overhead = probe.result()
    if watch is not None:
        await watch.end(bench.clock)
    return RunOutcome(
        _finished(config.load, plan, bench, stopped=stopped),
        server,
        run_id,
        started_at,
        failures,
        digest,
        overhead,
        None if watch is None else watch.as_json(),
    )


def _observers(
    bench: Bench, probe: OverheadProbe, watch: SwitchWatch | None, *, quiet: bool
) -> list[Coroutine[None, None, None]]:
    """Return the work that runs beside the load and never ends by itself."""
    found = [probe.watch()]
    if watch is not None:
        found.append(watch.watch(bench.clock))
    if not quiet:
        console = Console(stderr=True)
        found.append(show_progress(lambda: bench.meter.snapshot(bench.clock()), console))
    return found


def _bench(session: aiohttp.ClientSession, config: RunConfig, model: str, planned: int) -> Bench:
    """Return a new bench, whose clock starts now."""
    style = BodyStyle(config.endpoint, model, config.prompt, config.temperature, config.ignore_eos)
    target = Target(config.url, config.endpoint, config.timeout_s)
    clock, meter = clock_from_now(), Meter(planned)
    client = Client(session, target, clock, meter)
    return Bench(
        prepare=partial(request_body, style),
        remember=partial(exchange_of, style.prompt),
        send=client.send,
        clock=clock,
        meter=meter,
    )


def planned_run(config: RunConfig, run_id: str) -> tuple[tuple[PlannedRequest, ...], str]:
    """Return the run's requests, and the digest that identifies them in reports."""
    plan = _plan(config, run_id)
    style = (config.prompt, config.endpoint, config.ignore_eos, config.temperature)
    return plan, digest_of(plan, style)


def _plan(config: RunConfig, run_id: str) -> tuple[PlannedRequest, ...]:
    match config.load:
        case ClosedLoad(_, requests):
            return plan_closed(requests, config.workload, seed=config.seed, run_id=run_id)
        case TraceLoad(trace, _, length_scale, _):
            return plan_trace(
                trace.rows,
                config.workload,
                length_scale=length_scale,
                seed=config.seed,
                run_id=run_id,
            )
        case OpenLoad(phases, kind, burst_requests, _, _):
            arrivals = plan_arrivals(phases, kind, seed=config.seed, burst_requests=burst_requests)
            if not arrivals:
                raise UsageError("The run is too short for a request: make it longer.")
            return plan_open(arrivals, config.workload, seed=config.seed, run_id=run_id)


async def _warm_up(bench: Bench, config: RunConfig, run_id: str) -> int:
    """Send requests one after another that no report counts; return how many failed.

    Their indexes are negative, so their prompts differ from those of the run.
    """
    plan = plan_closed(
        config.warmup_requests, config.workload, seed=config.seed, run_id=f"{run_id}-warm"
    )
    turned = [replace(planned, index=-1 - planned.index) for planned in plan]
    await run_closed(turned, bench, concurrency=1)
    return sum(not record.ok for record in bench.records)


def _paced(plan: Sequence[PlannedRequest], bench: Bench, load: Load) -> Coroutine[None, None, None]:
    match load:
        case OpenLoad() | TraceLoad():
            return run_open(plan, bench, max_in_flight=load.max_in_flight)
        case ClosedLoad(concurrency, _):
            return run_closed(plan, bench, concurrency=concurrency)


async def _until_stopped(work: Coroutine[None, None, None]) -> bool:
    """Run `work` to its end, or cancel it at the first signal; return whether it was cancelled."""
    stop = asyncio.Event()
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    with _signals_set(stop):
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    was_stopped = not working.done()
    (working if was_stopped else stopping).cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(working, stopping)
    return was_stopped


@contextlib.contextmanager
def _signals_set(stop: asyncio.Event) -> Iterator[None]:
    """Make SIGINT and SIGTERM set `stop`; only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def _beside(observers: Sequence[Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Run the observers until the body ends."""
    tasks = [asyncio.create_task(each) for each in observers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


def _finished(
    load: Load, plan: Sequence[PlannedRequest], bench: Bench, *, stopped: bool
) -> Finished:
    """Return the run's facts; it ends with the last answer and, unless stopped, the last phase."""
    phases = () if isinstance(load, ClosedLoad) else load.phases
    planned_s = 0.0 if stopped else sum(phase.duration_s for phase in phases)
    last_s = max((record.ended_s for record in bench.records), default=0.0)
    records = sorted(bench.records, key=lambda record: record.planned.index)
    turns = Counter(planned.session for planned in plan if planned.session is not None)
    return Finished(tuple(records), phases, len(plan), max(planned_s, last_s), stopped, turns)


def _report(config: RunConfig, outcome: RunOutcome) -> dict[str, object]:
    finished = outcome.finished
    generator = overhead_as_json(finished.records, outcome.overhead)
    warnings = overload_warnings(finished.records, outcome.overhead)
    warnings += warnings_for(finished.records, ignore_eos=config.ignore_eos)
    warnings += _load_warnings(config.load, outcome)
    if outcome.warmup_failures:
        warnings.append(f"{outcome.warmup_failures} warm-up requests failed.")
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "started_at": outcome.started_at.isoformat(timespec="milliseconds"),
        "run_id": outcome.run_id,
        "environment": describe_environment(),
        "server": {
            "url": config.url,
            "model": outcome.server.model,
            "models": list(outcome.server.models),
            "version": outcome.server.version,
        },
        "warnings": warnings,
        "plan": _described(config, outcome.plan_digest),
        "generator": generator,
        "switches": outcome.switches,
        **build_report(finished, config.slos, keep_records=config.outputs.keep_records),
    }


def _load_warnings(load: Load, outcome: RunOutcome) -> list[str]:
    """Return further warnings: skipped rows of the trace, and switches that may be missing."""
    found = []
    if isinstance(load, TraceLoad) and load.trace.skipped_rows:
        found.append(f"{load.trace.skipped_rows} rows of the trace had no tokens and were skipped.")
    if outcome.switches and outcome.switches["missed_polls"]:
        found.append(
            f"The admin API did not answer {outcome.switches['missed_polls']} times, so switches "
            "may be missing or late."
        )
    return found


def _described(config: RunConfig, digest: str) -> dict[str, object]:
    """Return the requests' origin; reports with equal digests are about the same requests."""
    load = config.load
    return {
        "digest": digest,
        "seed": config.seed,
        "preset": load.preset if isinstance(load, OpenLoad) else None,
        "trace": None
        if not isinstance(load, TraceLoad)
        else {
            "file": load.source.name,
            "columns": load.trace.columns,
            "requests": len(load.trace.rows),
            "rows_left_out": load.trace.skipped_rows,
        },
    }


def _most_in_flight(load: Load) -> int:
    return load.concurrency if isinstance(load, ClosedLoad) else load.max_in_flight


def _model_names(body: object) -> tuple[str, ...]:
    listed = body.get("data") if isinstance(body, dict) else None
    entries = listed if isinstance(listed, list) else []
    return tuple(str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry)


def _reason_in(body: object) -> str:
    """Return what an error's body says, after a colon; empty if it says nothing."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f": {message[:REASON_CHARS_MAX]}" if isinstance(message, str) else ""


async def _version(session: aiohttp.ClientSession, url: str) -> str | None:
    """Return the version from `/version`, or None if the server has none."""
    try:
        status, body = await _get_json(session, f"{url}/version")
    except (aiohttp.ClientError, OSError):
        return None
    version = body.get("version") if status == 200 and isinstance(body, dict) else None
    return None if version is None else str(version)


async def _get_json(session: aiohttp.ClientSession, url: str) -> tuple[int, object]:
    """Return the status and the JSON of an answer, None for a body that is not JSON."""
    async with asyncio.timeout(DISCOVERY_TIMEOUT_S), session.get(url) as response:
        text = await response.text(errors="replace")
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, None
