"""When, of which commit and on what a benchmark was run: what every result says first."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

from coordinator.protocol.cores import usable_cores
from tests.harness.cells.servers import ROOT


def today() -> str:
    """The date in UTC, as files are named."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def commit() -> str:
    """The commit that is measured, as far as git or the environment knows."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found = done.stdout.strip()
    except OSError:
        found = ""
    return os.environ.get("COMMIT") or found or "unknown"


def cores_and_processor() -> str:
    """The usable cores, and the processor as the kernel names it."""
    return f"{usable_cores()} cores of {_cpu_name()}"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
