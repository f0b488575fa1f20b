"""`aileron up`: one command that serves a model on this machine until Ctrl-C."""

import argparse
import asyncio
import functools
import os
import secrets
import shlex
import shutil
import signal
import ssl
import sys
import tempfile
import time
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from comm_pool.layout import LayoutError, parse_layout
from comm_pool.ports import LOOPBACK
from coordinator.admin.key import ADMIN_KEY_ENV, KEY_VARIABLES, AdminKeyError, AdminKeys
from coordinator.cli.cell import Cell, CellProcess
from coordinator.cli.children import Child, ChildSpec
from coordinator.cli.config_source import ConfigSource, follow, start_following, write_config
from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.cli.hardware import gpu_memory_bytes, gpu_names, host_memory_bytes
from coordinator.cli.last_run import LastRun, remove_record, state_folder, write_record
from coordinator.cli.launch import Machine, build_config
from coordinator.cli.ports import free_ports, require_free
from coordinator.cli.process import command_of
from coordinator.cli.returns import Returns
from coordinator.cli.run_lock import lock_folder, release_folder
from coordinator.cli.screen import Screen, open_screen, read_rank_progress
from coordinator.cli.serve import API_KEY_ENV, TENANT
from coordinator.protocol.cell_tls import cell_tls_of
from coordinator.protocol.certificate import CertificateError, certificate_of
from coordinator.protocol.config import TOKEN_ENV, Config, ConfigError, shared_token
from coordinator.protocol.cores import usable_cores
from coordinator.protocol.engine_options import OptionError
from coordinator.protocol.file_stamp import stamp_of
from coordinator.protocol.folders import (
    require_folder,
    require_gateway_folders,
    require_policy_files,
    words_of,
)
from coordinator.protocol.host_memory import free_memory_bytes
from coordinator.protocol.keys import ApiKey, dump_key, hash_of, load_keys, warning_of
from coordinator.protocol.model_check import (
    Memory,
    check_model,
    checked_options,
    require_reachable,
)
from coordinator.protocol.model_files import ModelFiles
from coordinator.protocol.nccl import check_nccl
from coordinator.protocol.option_values import check_paths
from coordinator.protocol.request_line import is_request_line
from coordinator.protocol.sized_goals import with_sized_goals

STOP_LIMITS_S = {"gateway": 40.0, "rank": 15.0, "coordinator": 5.0}
"""Processes in stop order, and how long each may take; the gateway lets streams in flight
finish."""
LOG_NAMES = {"gateway": "gateway", "rank": "worker", "coordinator": "coordinator"}
KILLED_STATUS = 130
"""Exit status after a second Ctrl-C, which cuts running streams."""
PROBE_LIMIT_S = 2.0
ENGINE_ARGS = "model.engine_args: "
"""How a message names the setting that the options after -- become."""
OFFLINE_ENV = "HF_HUB_OFFLINE"
ONLY_CACHED = "Hugging Face does not answer: the model is served from its cache"
TOKEN_BYTES = 32
_ANYWHERE = ("", "0.0.0.0", "::")


def run_up(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C; returns the exit status."""
    unwind_at_signals()
    grpc, rendezvous, serving, admin = free_ports(4)
    run_dir = _temporary_folder()
    ports = (grpc, rendezvous, serving, admin)
    state_dir, no_state = _state_folder()
    machine = Machine(len(gpu_names()), ports, str(run_dir), state_dir, cores=usable_cores())
    reason: str | None = None
    own_keys = run_dir / "keys.yaml"
    lock: IO[str] | None = None
    try:
        if options.api_keys:
            options.keys = write_keys(own_keys, options.api_keys)
            os.environ.pop(API_KEY_ENV, None)
        stamp = stamp_of(options.config) if options.config else None
        config = build_config(options, machine)
        if check_files(config).only_cached:
            # Each process would ask again and again for a minute.
            os.environ[OFFLINE_ENV] = "1"
            options.notes = (*options.notes, ONLY_CACHED)
        config = _with_goals(config)
        notes = [
            *options.notes,
            *([] if config.batches.data_dir else [no_state]),
            *_warnings(config),
        ]
        _check_folders(config)
        lock = lock_folder(Path(config.run_dir), config.served_model_name)
        _require_free_ports(config)
        for each in notes:
            print(f"aileron: {each}", file=sys.stderr)
        visible = TerminalFilter(processes=options.verbose, requests=options.log_requests)
        source = options.config and ConfigSource(
            options.config, lambda: _with_goals(build_config(options, machine)), stamp
        )
        reason, was_killed = asyncio.run(_serve(config, open_screen(), visible, source))
    finally:
        if lock is not None:
            release_folder(lock)
        own_keys.unlink(missing_ok=True)
        # Keep the logs after a failure; a run that was asked to stop leaves nothing.
        if reason == "" or not any(run_dir.iterdir()):
            shutil.rmtree(run_dir, ignore_errors=True)
    if reason:
        print(f"aileron: logs are kept in {config.run_dir}", file=sys.stderr)
        raise CliError(reason)
    return KILLED_STATUS if was_killed else 0


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="aileron-"))
    except OSError as error:
        raise CliError(
            f"no temporary folder can be made ({words_of(error)}): name one with TMPDIR."
        ) from error


def _state_folder() -> tuple[str, str]:
    """Return this user's folder for data, and nothing; or nothing, and why there is none."""
    folder = state_folder()
    try:
        require_folder("the folder for files and batches", folder)
    except ConfigError as error:
        return "", f"{error} Until then the files and batches of the API are off."
    return str(folder), ""


def _warnings(config: Config) -> list[str]:
    """Return what does not keep a cell from serving, but its clients from being served."""
    if not config.gateway.keys_file:
        return []
    path = Path(config.gateway.keys_file)
    warning = warning_of(load_keys(path).values(), path, datetime.now(UTC))
    return [f"warning: {warning}"] if warning else []


def _check_folders(config: Config) -> None:
    try:
        require_gateway_folders(config)
        require_policy_files(config)
        if config.policy.step_times:
            from coordinator.server.policy_files import read_step_times

            read_step_times(config.policy.step_times)
        AdminKeys(os.environ).require(config.admin.host)
    except (ConfigError, AdminKeyError) as error:
        raise CliError(str(error), USAGE_STATUS) from error


def unwind_at_signals() -> None:
    """Let signals that end the process unwind it, until the running cell handles them itself."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, leave)


def write_keys(path: Path, secrets_of_user: Sequence[str]) -> Path:
    """Write the hashes of keys that came with the command line, for this run alone."""
    keys = (ApiKey(hash=hash_of(each), tenant=TENANT) for each in dict.fromkeys(secrets_of_user))
    path.touch(mode=0o600)
    path.write_text("keys:\n" + "".join(map(dump_key, keys)))
    return path


@dataclass(frozen=True, slots=True)
class CheckedFiles:
    """The files of a model that can be served."""

    model: ModelFiles
    only_cached: bool
    """Whether they come from Hugging Face's cache, and nobody answers there."""


def check_files(config: Config) -> CheckedFiles:
    """Refuse what would fail later, before processes import vLLM for 20 s."""
    is_cpu = config.cell.device == "cpu"
    size = host_memory_bytes() if is_cpu else gpu_memory_bytes()
    free = free_memory_bytes() if is_cpu else None
    memory = Memory(size, "this machine" if is_cpu else "its GPU", free) if size else None
    try:
        if config.gateway.keys_file:
            load_keys(Path(config.gateway.keys_file))
        certificate_of("gateway", config.gateway.tls_cert_file, config.gateway.tls_key_file)
        certificate_of("admin", config.admin.tls_cert_file, config.admin.tls_key_file)
        cell_tls_of(config.cell_tls)
        check_nccl(config)
        check_paths(checked_options(config))
        files = check_model(config, memory=memory)
        only_cached = require_reachable(config, files)
    except (ConfigError, CertificateError, OptionError) as error:
        raise CliError(str(error).removeprefix(ENGINE_ARGS), USAGE_STATUS) from error
    return CheckedFiles(files, only_cached)


def _with_goals(config: Config) -> Config:
    """Settle the objectives here: the cell's processes ask nobody for a config.json."""
    try:
        return with_sized_goals(config)
    except ConfigError as error:
        raise CliError(str(error), USAGE_STATUS) from error


def _require_free_ports(config: Config) -> None:
    require_free(config.gateway.host, config.gateway.port, "--port")
    require_free(config.admin.host, config.admin.port, "--admin-port")
    host, _, port = config.coordinator.listen.rpartition(":")
    if not host or not port.isdigit():
        raise CliError(
            f"coordinator.listen '{config.coordinator.listen}' is no host:port: set "
            "one such as 127.0.0.1:8002."
        )
    require_free(host, int(port), "coordinator.listen in the --config file")


@dataclass(frozen=True, slots=True)
class TerminalFilter:
    """The lines of the processes that the terminal shows; their files hold all of them."""

    processes: bool = False
    requests: bool = False

    def has(self, line: str) -> bool:
        """Return whether the terminal shows a line."""
        return self.requests if is_request_line(line) else self.processes


async def _serve(
    config: Config, screen: Screen, visible: TerminalFilter, source: ConfigSource | None
) -> tuple[str, bool]:
    """Serve until Ctrl-C or a failure; return the reason of a failure, and whether all was killed.

    Without a failure the reason is empty.
    """
    config_file = Path(config.run_dir) / "config.yaml"
    write_config(config_file, config)
    start_following(source, config_file)
    started = time.monotonic()
    with screen:
        screen.say(
            f"starting {config.served_model_name} in layout {config.cell.layout} on "
            f"{config.cell.ranks} {config.cell.device} ranks; logs in {config.run_dir}"
        )
        cell = Cell(_members(config, config_file, screen, visible), screen)
        ready_url = f"{_serving_url(config)}/ready"

        def on_serving() -> None:
            screen.loaded()
            write_record(_record(config))
            _welcome(config, screen, time.monotonic() - started)

        following = asyncio.create_task(follow(source, config_file, screen.say))
        try:
            status = await cell.run(functools.partial(_answers, ready_url), on_serving)
        finally:
            following.cancel()
            remove_record(os.getpid())
    return ((cell.reason or "the cell failed.") if status else ""), cell.was_killed


def _members(
    config: Config, config_file: Path, screen: Screen, visible: TerminalFilter
) -> list[CellProcess]:
    env = {**os.environ, TOKEN_ENV: _token(), "PYTHONUNBUFFERED": "1"}

    returns = Returns(time.monotonic)

    def on_event(fields: Mapping[str, Any]) -> None:
        progress = read_rank_progress(fields)
        if (words := returns.words_for(fields)) is not None:
            screen.say(words)
        if progress is not None:
            screen.rank(progress)
        elif (words := words_for(fields)) is not None:
            screen.say(words)

    def on_line(name: str, line: str) -> None:
        if visible.has(line):
            screen.say(f"{name} | {line}")

    members = []
    for name, limit_s in STOP_LIMITS_S.items():
        log_name = LOG_NAMES[name]
        own_env = env if name == "coordinator" else _without(env, KEY_VARIABLES)
        log = Path(config.run_dir) / f"{log_name}.log"
        spec = ChildSpec(log_name, command_of(name, config_file), own_env, log)
        child = Child(spec, on_event, on_line)
        members.append(CellProcess(child, restarts=name != "rank", stop_limit_s=limit_s))
    return members


def words_for(fields: Mapping[str, Any]) -> str | None:
    """Return the text to show for an event of a child, or None."""
    match fields:
        case {"event": "coordinator_ready"}:
            return "coordinator is up"
        case {"event": "gateway_ready"}:
            return "gateway is up"
        case {"event": "gateway_draining", "requests": int(count), "limit_s": limit_s} if count:
            return f"waiting up to {limit_s:.0f} s for {count} request{'s'[: count > 1]} to end"
        case {"event": "config_read", "process": "coordinator", "changed": [*names]} if names:
            return f"the configuration has changed: {', '.join(map(str, names))}"
        case {"event": "config_refused", "process": "coordinator", "reason": reason}:
            return f"the old configuration stays: {reason}"
        case {"event": "api_key_dropped", "reason": reason}:
            return f"warning: {reason}"
        case {"event": "worker_progress", "stage": "config", "done": 0}:
            return "worker has imported vLLM and reads the model's configuration"
        case {"event": "rank_exited", "rank": rank, "starts_in_s": float(delay_s)}:
            return f"rank {rank} ended; starting it again in {delay_s:.1f} s, the others serve"
        case {"event": "rank_failed", "rank": rank, "reason": reason}:
            return f"rank {rank} failed: {reason}"
    return None


def _token() -> str:
    """Return the user's secret, or a fresh one."""
    if TOKEN_ENV not in os.environ:
        return secrets.token_urlsafe(TOKEN_BYTES)
    try:
        return shared_token()
    except ConfigError as error:
        raise CliError(str(error)) from error


def _without(env: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


async def _answers(url: str) -> bool:
    return await asyncio.to_thread(_answers_now, url)


def _answers_now(url: str) -> bool:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        # This asks its own process whether it is up, by an address that its certificate may lack.
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        handlers.append(urllib.request.HTTPSHandler(context=unverified))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(url, timeout=PROBE_LIMIT_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _reachable(host: str) -> str:
    if host in _ANYWHERE:
        return LOOPBACK
    return f"[{host}]" if ":" in host else host


def _serving_url(config: Config) -> str:
    gateway = config.gateway
    return f"{gateway.scheme}://{_reachable(gateway.host)}:{gateway.port}"


def _record(config: Config) -> LastRun:
    return LastRun(
        pid=os.getpid(),
        admin_url=f"{config.admin.scheme}://{_reachable(config.admin.host)}:{config.admin.port}",
        base_url=f"{_serving_url(config)}/v1",
        run_dir=config.run_dir,
    )


def own_command() -> str:
    """Return the command with which this user runs `aileron`."""
    if shutil.which("aileron"):
        return "aileron"
    beside = Path(sys.executable).with_name("aileron")
    for own in (Path(sys.argv[0]), beside):
        if own.name == "aileron" and own.exists():
            folder = Path.cwd()
            return str(own.relative_to(folder) if own.is_relative_to(folder) else own)
    return f"{shlex.quote(sys.executable)} -m coordinator.cli"


def other_layout(config: Config) -> str | None:
    """Return a layout to switch to: the widest groups, else every rank alone; None if none."""
    cell = config.cell
    widest = max(cell.widths)
    names = ["+".join([f"tp{widest}"] * (cell.ranks // widest)), f"dp{cell.ranks}"]
    now = config.initial_layout()
    for name in names:
        with suppress(LayoutError):
            other = parse_layout(name, cell.ranks, cell.widths)
            is_served = config.narrowest == 1 or name != names[1]
            if is_served and other != now:
                return name
    return None


def _welcome(config: Config, screen: Screen, seconds: float) -> None:
    screen.say(f"serving {config.served_model_name} after {seconds:.1f} s")
    has_admin_key = not AdminKeys(os.environ).is_open
    for line in welcome_lines(config, own_command(), has_admin_key=has_admin_key):
        print(line, flush=True)


def welcome_lines(config: Config, command: str, *, has_admin_key: bool) -> tuple[str, ...]:
    """Return what a user can do now, as commands that work but for the keys, which stay secret."""
    run, name, other = _record(config), config.served_model_name, other_layout(config)
    body = f'{{"model":"{name}","messages":[{{"role":"user","content":"What is a list?"}}]}}'
    key = "-H 'Authorization: Bearer YOUR_API_KEY' " if config.gateway.keys_file else ""
    curl = (
        f"curl {run.base_url}/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'"
    )
    admin_key = f"{ADMIN_KEY_ENV}=YOUR_ADMIN_KEY " if has_admin_key else ""
    return (
        "",
        f"  OpenAI API   {run.base_url}",
        f"  admin API    {run.admin_url}",
        f"  try it       {curl}",
        *([f"  switch       {admin_key}{command} switch {other}"] if other else []),
        "  stop         Ctrl-C",
        "",
    )
