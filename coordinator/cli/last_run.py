"""The address of this user's last `aileron up`, for the commands that talk to it.

A convenience only: every command takes `--admin-url`. The file holds no secret.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from coordinator.cli.errors import USAGE_STATUS, CliError

DEFAULT_ADMIN_URL = "http://127.0.0.1:8001"


@dataclass(frozen=True, slots=True)
class LastRun:
    """One running `aileron up`."""

    pid: int
    admin_url: str
    base_url: str
    run_dir: str


def record_path() -> Path:
    """Return the record file of this user: in the runtime folder, else in the home folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "aileron" / "last-run.json"
    return Path.home() / ".aileron" / "last-run.json"


def state_folder() -> Path:
    """Return this user's folder for data that outlives a run, such as files and batches."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return Path(state) / "aileron" if state else Path.home() / ".aileron"


def write_record(run: LastRun) -> None:
    """Record `run`; an unwritable folder does not stop it from serving."""
    path = record_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{run.pid}")
        fresh.write_text(json.dumps(asdict(run)))
        fresh.replace(path)
    except OSError:
        return


def read_record() -> LastRun | None:
    """Return the last run if its process still lives."""
    try:
        run = LastRun(**json.loads(record_path().read_text()))
        os.kill(run.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return run


def remove_record(pid: int) -> None:
    """Delete the record of `pid`; a later run's record stays."""
    run = read_record()
    if run is not None and run.pid == pid:
        record_path().unlink(missing_ok=True)


def find_admin_url(given: str | None) -> str:
    """Return the given URL, else the last run's, else the default port's; raises `CliError`."""
    if given:
        return _url_of(given)
    run = read_record()
    return run.admin_url if run else DEFAULT_ADMIN_URL


def _url_of(given: str) -> str:
    """Return the URL of an address that may lack its scheme."""
    url = given.strip()
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(url)
        is_usable = bool(parts.scheme in ("http", "https") and parts.hostname and parts.port != 0)
    except ValueError:
        is_usable = False
    if not is_usable:
        raise CliError(
            f"--admin-url {given} is no address: use one such as {DEFAULT_ADMIN_URL}.",
            USAGE_STATUS,
        )
    return url
