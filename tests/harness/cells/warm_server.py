"""`tests.harness.cells.warm_server KIND FD`: imports what a process needs, then forks such.

Every request on the socket FD is a module with its arguments, its environment and, as descriptors,
what it writes to. The process that is forked runs the module as `python -m` would. It is handed to
whoever asked as a child: the process between the two ends, and who asked is a reaper meanwhile.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from typing import Any

import setproctitle

MESSAGE_BYTES_MAX = 1 << 17
"""Largest request; an environment is most of it."""

IMPORTS = {
    "worker": (
        "worker.launch.launcher",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.model_executor.models.llama",
    ),
    "gateway": ("gateway.process",),
    "product": (
        "worker.launch.launcher",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.model_executor.models.llama",
        "gateway.process",
    ),
    "plain": ("vllm", "vllm.v1.worker.cpu_model_runner", "vllm.model_executor.models.llama"),
    "nothing": (),
}
"""What each kind of process takes seconds to import; `product` is one that forks the others."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "worker": ("worker",),
    "gateway": ("gateway",),
    "product": ("worker",),
    "plain": (),
    "nothing": (),
}
"""Whose environment it is imported in."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the socket is closed; in a forked process, run its module."""
    kind, asked = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    setproctitle.getproctitle()  # It finds its memory only where the environment is as it was.
    for package in PACKAGES[kind]:
        if package == "gateway":
            importlib.import_module("gateway.environment").settle(os.environ)
            continue
        given = importlib.import_module(f"{package}.__main__")
        os.environ.update({**given.VLLM_ENVIRONMENT, **os.environ, **given.FIXED_ENVIRONMENT})
        del sys.modules[given.__name__]  # It is run as another module.
    for name in IMPORTS[kind]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    asked.send(b"ready")
    module = serve(asked)
    if module is None:
        os._exit(0)  # Taking down torch's modules would only print about leaks of theirs.
    asked.close()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def serve(asked: socket.socket) -> str | None:
    """Fork a process per request; returns None at the end, and in each process its module."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, MESSAGE_BYTES_MAX, 2)
        if not message:
            return None
        read, write = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            if forked := os.fork():
                os.write(write, str(forked).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            os.close(read)
            os.close(write)
            return become(json.loads(message), descriptors)
        os.close(write)
        for each in descriptors:
            os.close(each)
        os.waitpid(between, 0)
        asked.send(os.read(read, 32))
        os.close(read)


def become(request: dict[str, Any], descriptors: list[int]) -> str:
    """Take the request's surroundings; returns its module."""
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # An import may have looked for it in the environment as it was.
    if request["dies_with_parent"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    module: str = request["module"]
    setproctitle.setproctitle(" ".join([sys.executable, "-m", module, *request["arguments"]]))
    sys.argv = [module, *request["arguments"]]
    return module


if __name__ == "__main__":
    main()
