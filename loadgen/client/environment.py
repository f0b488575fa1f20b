"""Facts about the client machine that a reader of a report needs. Never raises.

The commit is the working directory's, if it has one: a benchmark number cannot be reproduced
without the code it was measured on.
"""

import os
import platform
import subprocess
from importlib.metadata import version

from loadgen import __version__

GIT_TIMEOUT_S = 5.0


def describe_environment() -> dict[str, object]:
    """Return versions, processors, load and commit of the machine that makes the load."""
    return {
        "loadgen": __version__,
        "python": platform.python_version(),
        "aiohttp": version("aiohttp"),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed_files": _changed_files(),
    }


def _changed_files() -> int | None:
    status = _git("status", "--porcelain")
    return None if status is None else len(status.splitlines())


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
