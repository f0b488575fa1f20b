"""`python -m tests.harness.cells.warm_up up ...`: `aileron up` whose children need import nothing.

It was forked from a process that has imported what gateways and workers need, and forks them the
same way. They are its children as ever, in groups of their own, and die with it; coordinators,
which import nothing of vLLM, are started from nothing.
"""

import os
import runpy
import socket
import subprocess
import sys
from typing import Any

from tests.harness.cells.warm import Server, fork_module
from tests.harness.cells.warm_server import serve

MODULES = ("gateway", "worker")


def nursery() -> Server | str:
    """Fork who forks our children; returns it, and in each of them its module."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return Server(ours)
    ours.close()
    module = serve(theirs)
    if module is None:
        os._exit(0)
    theirs.close()
    return module


def fork_children(server: Server) -> None:
    """Let `Popen` fork what would import for seconds."""
    start_anew: Any = subprocess.Popen

    def start(command: Any, **given: Any) -> Any:
        if list(command[:3]) != [sys.executable, "-P", "-m"] or command[3] not in MODULES:
            return start_anew(command, **given)
        assert (given["stdout"], given["stderr"]) == (subprocess.PIPE, subprocess.STDOUT)
        process = fork_module(
            server,
            command[3],
            command[4:],
            env=given["env"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            dies_with_parent=True,
        )
        os.setpgid(process.pid, 0)
        return process

    subprocess.Popen = start  # type: ignore[misc, assignment]


def main() -> None:
    """Run the command, or what it was forked for."""
    found = nursery()
    if isinstance(found, str):
        runpy.run_module(found, run_name="__main__", alter_sys=True)
        return
    fork_children(found)
    from coordinator.cli import main as command

    sys.exit(command())


if __name__ == "__main__":
    main()
