"""Starts, asks and ends static vLLM engines, one process each, and looks at the GPUs' memory."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.bench.gpu_load import merged
from tests.harness.cells.servers import ROOT

LOAD_LIMIT_S = 120
"""For the imports of a child."""
GPU_FREE_LIMIT_S = 40
GPU_STILL_S = 8
"""When nothing was given back for so long, nothing more will be."""
GPU_FREE_MARGIN_MIB = 600
"""Above what was used before the first server: what a driver keeps for a while."""
START_BARRIER_S = 1.0
"""Engines that are loaded together start this long after they were told."""
ANSWER_BYTES_MAX = 1 << 24
LOG_CHARS = 6_000
"""Of a log that goes into an error."""


class ServerError(RuntimeError):
    """A server that did not start, ended, or could not measure; the message says why."""


def visible_gpus(ranks: int) -> list[str]:
    """Names of the first `ranks` GPUs that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    return (names or [str(number) for number in range(ranks)])[:ranks]


def nvidia_smi(fields: str) -> list[list[str]]:
    """One row per GPU that this process may use; nothing where there is none."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = [f"--id={given}"] if given else []
    try:
        done = subprocess.run(
            ["nvidia-smi", *only, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def gpu_memory_mib() -> list[int]:
    """MiB used on each GPU that this process may use."""
    return [int(row[0]) for row in nvidia_smi("memory.used") if row[0].isdigit()]


async def wait_gpus_free(baseline_mib: Sequence[int]) -> float:
    """Wait until the GPUs hold what they held before, or give up no more; returns the seconds."""
    started = changed = time.monotonic()
    last: list[int] = []
    while (now := time.monotonic()) - started < GPU_FREE_LIMIT_S:
        used = await asyncio.to_thread(gpu_memory_mib)
        pairs = zip(used, baseline_mib, strict=False)
        if all(mib <= before + GPU_FREE_MARGIN_MIB for mib, before in pairs):
            break
        if used != last:
            last, changed = used, now
        elif now - changed > GPU_STILL_S:
            break
        await asyncio.sleep(0.3)
    return time.monotonic() - started


def end_tree(pid: int) -> None:
    """Kill a process of ours and all below it, and unlink the shared memory that they mapped."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    segments: set[str] = set()
    for process in tree:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            segments |= {line.split()[5] for line in maps if " /dev/shm/" in line}
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    for segment in segments:
        Path(segment).unlink(missing_ok=True)


class StaticEngine:
    """One child process with one engine."""

    def __init__(self, name: str, folder: Path, spec: dict[str, Any], env: dict[str, str]) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self._spec = folder / f"{name}.json"
        self._log = folder / f"{name}.log"
        self._spec.write_text(json.dumps(spec))
        self._env = env
        self._process: asyncio.subprocess.Process | None = None

    async def spawn(self) -> None:
        """Start the process, which imports and then waits."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.bench.gpu_static", str(self._spec)),
                cwd=ROOT,
                env={**os.environ, **self._env},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=ANSWER_BYTES_MAX,
                start_new_session=True,
            )

    async def start(self, limit_s: float) -> dict[str, Any]:
        """Build the engine, once the imports are done."""
        await self._answer(LOAD_LIMIT_S)
        self.facts = await self._ask({"do": "start"}, limit_s)
        return self.facts

    async def measure(self, kind: str, limit_s: float, **sizes: Any) -> dict[str, Any]:
        """Run one of `gpu_load.MEASURES` there."""
        command = {"do": kind, "args": {"tag": self.name, **sizes}, "limit_s": limit_s}
        return await self._ask(command, limit_s + 10)

    async def _ask(self, command: dict[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write((json.dumps(command) + "\n").encode())
        await self._process.stdin.drain()
        answer: dict[str, Any] = await self._answer(limit_s)
        return answer

    async def _answer(self, limit_s: float) -> Any:
        assert self._process is not None and self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), limit_s)
        except TimeoutError:
            raise ServerError(
                f"{self.name}: no answer in {limit_s:.0f} s.\n{self.tail()}"
            ) from None
        if not line:
            raise ServerError(f"{self.name} ended.\n{self.tail()}")
        message = json.loads(line)
        if "error" in message:
            raise ServerError(f"{self.name}: {message['error']}\n{self.tail()}")
        return message["ok"]

    def tail(self) -> str:
        """The end of what the process printed."""
        return self._log.read_text(errors="replace")[-LOG_CHARS:] if self._log.exists() else ""

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process is not None and self._process.returncode is None

    def kill(self) -> None:
        """End the process and its children at once."""
        if self._process is not None:
            end_tree(self._process.pid)


class StaticServers:
    """Independent engines of one kind: dp as one per GPU, tp as one over all."""

    def __init__(self, engines: list[StaticEngine], width: int) -> None:
        self.engines = engines
        self.width = width

    async def spawn(self) -> None:
        """Start all processes."""
        for engine in self.engines:
            await engine.spawn()

    async def start(self, limit_s: float) -> dict[str, Any]:
        """Build all engines at the same time."""
        facts = await asyncio.gather(*(engine.start(limit_s) for engine in self.engines))
        slowest = max(one["start_s"] for one in facts)
        return {**facts[0], "start_s": slowest, "kv_tokens_all": [f["kv_tokens"] for f in facts]}

    async def measure(self, kind: str, everywhere: bool, limit_s: float, **sizes: Any) -> Any:
        """Measure on the first engine, or on all at the same time with these sizes each."""
        engines = self.engines if everywhere else self.engines[:1]
        if kind == "saturated":
            sizes["at_s"] = time.perf_counter() + START_BARRIER_S
        parts = await asyncio.gather(*(one.measure(kind, limit_s, **sizes) for one in engines))
        return merged(kind, parts)

    @property
    def is_alive(self) -> bool:
        """Whether all processes still run."""
        return all(engine.is_alive for engine in self.engines)

    def kill(self) -> None:
        """End all."""
        for engine in self.engines:
            engine.kill()
