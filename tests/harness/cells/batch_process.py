"""A process that serves files and batches of the product over a small application in vLLM's place.

`python -m tests.harness.cells.batch_process FOLDER [name=value …]` prints its port when it accepts
requests. Everything but the application is the product's: edge, routes, desk, store and runner.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coordinator.protocol.config import BatchesConfig
from coordinator.protocol.messages.gateway import BatchProgress
from gateway.admission.keyring import KeyRing
from gateway.admission.tiers import VLLM_PRIORITY_HEADER, tier_of_priority
from gateway.batches import api
from gateway.batches.api import batch_routes
from gateway.batches.setup import set_up_batches
from gateway.errors import api_error
from gateway.http.edge import Edge
from gateway.http.line_call import LineAnswer, LineCall
from gateway.http.routes import OPEN_PATHS
from tests.harness.faults.slow_disk import slowed

ROOT = Path(__file__).resolve().parents[3]
START_S = 60
FOREVER_S = 3_600
PROMPT_CHARS = 20
"""Of a prompt, in what is told of it."""
OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
"""Runs a command that may mount what nobody else sees."""


class Application:
    """Answers completions; the prompt says how, see `complete`."""

    def __init__(self, *, slow_s: float) -> None:
        self._slow_s = slow_s
        self.running = 0
        self.running_max = 0
        self._tries: dict[str, int] = {}
        self._tiers: dict[str, str] = {}
        """Of each prompt, as vLLM would be told."""

    async def complete(self, request: Request) -> Response:
        """`bad` is a 400, `full-N` is refused N times, `broken` a 500, `slow` waits."""
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            body = await request.json()
            priority = int(request.headers[VLLM_PRIORITY_HEADER])
            self._tiers[str(body["prompt"])[:PROMPT_CHARS]] = tier_of_priority(priority).name
            return await self._complete(body)
        finally:
            self.running -= 1

    async def _complete(self, body: dict[str, str]) -> Response:
        prompt = body["prompt"]
        await asyncio.sleep(self._slow_s if prompt.startswith("slow") else 0)
        tries = self._tries[prompt] = self._tries.get(prompt, 0) + 1
        if prompt == "bad":
            return _refuse("invalid_value")
        if prompt == "broken":
            return _refuse("internal_error")
        if prompt.startswith("full-") and tries <= int(prompt.removeprefix("full-")):
            return _refuse("queue_full")
        choice = {"index": 0, "text": f"re: {prompt}", "finish_reason": "stop", "logprobs": None}
        return JSONResponse(
            {
                "id": "cmpl-1",
                "object": "text_completion",
                "created": 1,
                "model": body["model"],
                "choices": [choice],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            }
        )

    async def running_now(self, _: Request) -> Response:
        """Tell how many requests run, how many did at most, and in which tiers."""
        told = {"now": self.running, "most": self.running_max, "tiers": self._tiers}
        return JSONResponse({**told, "pid": os.getpid()})


def _refuse(code: str) -> Response:
    error = api_error(code, "No.")
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), status_code=error.status, headers=headers)


class Served:
    """The application behind the product's parts."""

    def __init__(self, config: BatchesConfig, slow_s: float, keys: str = "") -> None:
        own = Application(slow_s=slow_s)
        app = Starlette(
            routes=[
                Route("/v1/completions", own.complete, methods=["POST"]),
                Route("/health", own.running_now, methods=["GET"]),
            ]
        )
        parts = set_up_batches(config, f"test-{os.getpid()}", self._answer)
        assert parts is not None
        self.parts = parts
        app.router.routes += batch_routes(parts)
        self.edge = Edge(app, KeyRing(keys))
        self.told: Sequence[BatchProgress] = ()

    async def _answer(self, call: LineCall) -> LineAnswer:
        return await self.edge.answer_line(call)

    def tell(self, batches: Sequence[BatchProgress]) -> None:
        """Keep what a gateway would tell the coordinator."""
        self.told = batches

    async def close(self) -> None:
        """Give the batches back."""
        await self.parts.desk.close()
        await self.parts.store.close()


async def _serve(config: BatchesConfig, slow_s: float, keys: str) -> None:
    served = Served(config, slow_s, keys)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(served.edge, log_config=None, lifespan="off"))
    desk = asyncio.create_task(served.parts.desk.run(lambda: True, served.tell))
    print(listener.getsockname()[1], flush=True)
    await server.serve(sockets=[listener])
    desk.cancel()
    await served.close()


class BatchProcess:
    """The process, from a test."""

    def __init__(
        self,
        folder: Path,
        keys: str = "",
        *,
        disk_bytes: int = 0,
        disk_wait_ms: int = 0,
        **settings: object,
    ) -> None:
        """With `disk_bytes` the folder is a disk of that size, which only the process sees.

        With `disk_wait_ms` each read, write and flush of a file in it takes so much longer.
        """
        words = [f"{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", __name__, str(folder), keys, *words]
        if disk_bytes:
            mount = f'mount -t tmpfs -o size={disk_bytes} none "$0" && exec "$@"'
            command = [*OWN_MOUNTS, "sh", "-c", mount, str(folder), *command]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **slowed(folder, disk_wait_ms)},
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        port = self.process.stdout.readline()
        timer.cancel()
        assert port, "the process did not start."
        self.url = f"http://127.0.0.1:{int(port)}"

    def kill(self) -> None:
        """Kill it as the kernel would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Leave nothing of it."""
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main() -> None:
    """Serve until a signal ends it."""
    assert "/health" in OPEN_PATHS
    folder, keys, *words = sys.argv[1:]
    settings = dict(word.split("=", 1) for word in words)
    slow_s = float(settings.pop("slow_s", str(FOREVER_S)))
    if "window_s" in settings:
        vars(api)["WINDOW_S"] = int(settings.pop("window_s"))
    config = BatchesConfig.model_validate({"data_dir": folder, **settings})
    asyncio.run(_serve(config, slow_s, keys))


if __name__ == "__main__":
    main()
