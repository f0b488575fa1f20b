"""`aileron gateway | coordinator | rank`: becomes one process of a cell, for containers.

The other packages are started by name, never imported: the coordinator must not import vLLM.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

PACKAGES = {"gateway": "gateway", "coordinator": "coordinator", "rank": "worker"}
"""Command -> package whose `__main__` it runs."""


def command_of(name: str, config: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the command line of one process of a cell."""
    # -P: a folder named `worker` or `gateway` in the current directory must not shadow ours.
    return [sys.executable, "-P", "-m", PACKAGES[name], "--config", str(config), *options]


def run_process(name: str, config: Path, options: Sequence[str] = ()) -> NoReturn:
    """Replace this process, so that signals reach the right one."""
    command = command_of(name, config, options)
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606
