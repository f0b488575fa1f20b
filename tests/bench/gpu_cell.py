"""aileron's side of the GPU benchmark: one cell, and a client that stands below its gateway.

The cell is the one that tests use: coordinator and ranks as processes, no HTTP in front of them.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from coordinator.protocol import wire
from coordinator.protocol.messages.gateway import Cancel, Submit, TaskFailed
from coordinator.protocol.terms import TaskId, Tier
from tests.bench.gpu_load import GREEDY, MEASURES, LoadClient, calm_collector, merged
from tests.bench.gpu_servers import LOG_CHARS, ServerError
from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.vllm.engine_request import encoded_request

PAUSE_LIMIT_MS = 600_000
"""Longer than any run, so that paused tasks stay paused."""
SETTLE_S = 0.3
"""Between two phases: ranks report the ends of tasks with their heartbeats."""
HISTORY = 1_000


class CellClient(LoadClient):
    """Submits tasks as a gateway does and reads the headers of what leaders push."""

    def __init__(self) -> None:
        super().__init__()
        self._session = _Session(self)
        self.tier = Tier.STANDARD
        """Of the requests that it prepares."""

    @asynccontextmanager
    async def connected(self, cell: BareCell) -> AsyncIterator["CellClient"]:
        """Hold a session for the length of the block."""
        async with self._session.connected(cell):
            yield self

    def prepare(self, name: str, prompt: list[int], tokens: int) -> Submit:
        """Build the message that a gateway would send."""
        params = {**GREEDY, "max_tokens": tokens}
        reply_to = self._session.reply_to
        return Submit(*encoded_request(name, prompt, reply_to, self.tier, params))

    async def _send(self, prepared: Submit) -> None:
        self._session.post(prepared)

    async def cancel(self, names: list[str]) -> None:
        """Tell the coordinator."""
        for name in names:
            self._session.post(Cancel(TaskId(name)))


class _Session(TaskClient):
    """The tests' client, which hands on what it hears instead of assembling streams."""

    # It must not ping: after three pings of a session on which nothing else happens, such as
    # during a long phase of decoding, gRPC's server takes them for an attack and hangs up.
    channel_options = tuple(o for o in wire.CHANNEL_OPTIONS if "keepalive" not in o[0])

    def __init__(self, client: LoadClient) -> None:
        super().__init__()
        self._client = client

    @property
    def reply_to(self) -> str:
        """Address that leaders push tokens to."""
        return self._reply_to

    def post(self, message: Submit | Cancel) -> None:
        """Send on the gateway's session."""
        self._up.put_nowait(message)

    async def _read_tokens(self, pull: Any) -> None:
        try:
            while True:
                header, *_ = await pull.recv_multipart()
                batch = wire.decode_token_batch(header)
                spans = [(str(span.task), span.count, span.finished) for span in batch.spans]
                self._client.take(batch.rank, batch.epoch, spans)
        except Exception as error:
            self._client.fail(error)
            raise

    async def _read_events(self, call: Any) -> None:
        async for message in call:
            if isinstance(message, TaskFailed) and message.task in self._client.logs:
                error = ServerError(f"{message.code}: {message.message}")
                self._client.fail(error, str(message.task))


def preload() -> None:
    """Import what requests are built with."""
    import vllm.sampling_params
    import vllm.v1.engine
    import vllm.v1.serial_utils  # noqa: F401

    calm_collector()


class RunningCell:
    """A started cell with a connected client."""

    def __init__(self, cell: BareCell, client: CellClient, start_s: float) -> None:
        self.cell = cell
        self.client = client
        self.start_s = start_s
        self._numbers = itertools.count()
        self.engines = 1
        """Groups of the layout that serves, each of which gets a share of the load."""

    async def switch(self, layout: str, carry: str = "recompute") -> int:
        """Change the layout and wait until it serves; returns its epoch."""
        answer = await asyncio.to_thread(self.cell.switch, layout, carry)
        return int(answer["epoch"])

    async def get(self, path: str) -> Any:
        """GET on the admin port."""
        return await asyncio.to_thread(self.cell.get, path)

    async def measure(self, kind: str, everywhere: bool, limit_s: float, **sizes: Any) -> Any:
        """Run one of `gpu_load.MEASURES`, with these sizes or so many times them, spread."""
        if everywhere:
            sizes |= {k: sizes[k] * self.engines for k in ("streams", "requests") if k in sizes}
        # A task's name must not come again: the coordinator would take it for a repetition.
        tag = f"{kind}{next(self._numbers)}"
        try:
            part = await asyncio.wait_for(MEASURES[kind](self.client, tag=tag, **sizes), limit_s)
        finally:
            await self.client.clear()
            await asyncio.sleep(SETTLE_S)
        return merged(kind, [part])

    async def facts(self) -> dict[str, Any]:
        """What each rank says that it holds in memory, in bytes, and what a leak would show in."""
        ranks = (await self.get("/admin/ranks"))["ranks"]
        return {
            "memory": [rank["memory"] for rank in ranks],
            "gauges": [rank.get("gauges", {}) for rank in ranks],
        }

    async def switches(self, last: int) -> list[dict[str, Any]]:
        """The newest records, oldest of them first."""
        answer = await self.get(f"/admin/switches?last={min(last, HISTORY)}")
        records: list[dict[str, Any]] = answer["switches"]
        return records

    @property
    def is_alive(self) -> bool:
        """Whether its processes still run."""
        return all(process.poll() is None for process in self.cell.processes.values())

    def tail(self) -> str:
        """The end of the ranks' log."""
        return self.cell.log("worker")[-LOG_CHARS:]


@asynccontextmanager
async def running_cell(
    folder: Path,
    *,
    ranks: int,
    model: Path,
    device: str,
    engine_args: list[str],
    worker: str = "worker",
    settings: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] | None = None,
) -> AsyncIterator[RunningCell]:
    """Run a cell with these settings for the length of the block, its ranks by module `worker`."""
    started = time.monotonic()
    with ExitStack() as stack:
        up = bare_cell(
            folder,
            ranks=ranks,
            engine_args=engine_args,
            model=model,
            device=device,
            worker=worker,
            limits=dict(settings or {}),
            policy=dict(policy or {}),
            pause_limit_ms=PAUSE_LIMIT_MS,
        )
        # Beside each other: both import vLLM for seconds.
        cell, _ = await asyncio.gather(
            asyncio.to_thread(stack.enter_context, up), asyncio.to_thread(preload)
        )
        start_s = time.monotonic() - started
        client = CellClient()
        async with client.connected(cell):
            yield RunningCell(cell, client, round(start_s, 2))
