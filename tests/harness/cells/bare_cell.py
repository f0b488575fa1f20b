"""A real coordinator and real ranks without a gateway: tests speak its protocol themselves.

`TaskClient` stands where a gateway would: it submits vLLM requests and collects raw step outputs,
so that logits can be compared without HTTP in between.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec
import zmq
import zmq.asyncio

from coordinator.protocol import wire
from coordinator.protocol.config import Config, check_config, dump_config
from coordinator.protocol.messages.gateway import (
    Cancel,
    Done,
    GatewayHello,
    GatewayUp,
    Resubmit,
    Submit,
    TaskFailed,
)
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.prefixes import prefix_hashes
from coordinator.protocol.terms import TaskId, Tier
from gateway.token_stream import TokenStream, Trim, Verdict
from tests.harness.cells.admin import ask, get_json, switch
from tests.harness.cells.not_started import NotStartedError
from tests.harness.cells.servers import MODEL, ROOT, free_port
from tests.harness.cells.warm import start_module
from tests.harness.faults.fault_proxy import FaultProxy
from tests.harness.vllm.engine_request import encoded_request
from tests.harness.vllm.logit_rows import rows_of

TOKEN = "a-secret-for-tests-only"
START_LIMIT_S = 180
TASK_LIMIT_S = 120
LOGPROBS_MAX = 21
"""Columns where the likeliest tokens are asked for; more are the whole vocabulary."""


def search_path() -> str:
    """PYTHONPATH of child processes: this checkout first, then what the caller has."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


@dataclass
class BareCell:
    """Addresses of a running cell."""

    config: Config
    folder: Path
    processes: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)
    worker: str = "worker"
    coordinator: str = "coordinator"

    @property
    def admin(self) -> str:
        """Base URL of the admin port."""
        return f"http://127.0.0.1:{self.config.admin.port}"

    def log(self, name: str) -> str:
        """Log of `coordinator` or `worker`."""
        return (self.folder / f"{name}.log").read_text()

    def get(self, path: str) -> Any:
        """GET on the admin port."""
        return get_json(self.admin + path)

    def switch(self, layout: str, carry: str = "pause") -> Any:
        """POST /admin/layout and wait until it serves."""
        return switch(self.admin, layout, carry)

    def ask(self, layout: str, carry: str) -> Any:
        """POST /admin/layout and do not wait until it serves."""
        return ask(self.admin, layout, carry)

    def record(self, origin: str, wanted: str) -> dict[str, Any]:
        """The newest switch of this pair: a group may have been formed anew for pages since."""
        records = self.get("/admin/switches?last=20")["switches"]
        pair = [r for r in records if (r["from"], r["to"]) == (origin, wanted)]
        assert pair, f"no switch from {origin} to {wanted} in {records}"
        return max(pair, key=lambda record: int(record["epoch"]))

    def pages(self) -> list[dict[str, int]]:
        """The page accounting of every rank, which must add up."""
        pages: list[dict[str, int]] = [rank["pages"] for rank in self.get("/admin/ranks")["ranks"]]
        for each in pages:
            assert each["free"] + each["owned"] + each["leased"] + 1 == each["total"], pages
        return pages

    def start(self, name: str) -> None:
        """Start `coordinator` or `worker`; again after it ended."""
        module = {"worker": self.worker, "coordinator": self.coordinator}[name]
        arguments = ["--config", str(self._config_of(name))]
        env = {**os.environ, "AILERON_TOKEN": TOKEN, "PYTHONPATH": search_path()}
        # What is imported for CPU may open a device, which no process could use behind a fork.
        kind = "worker" if (name, self.config.cell.device) == ("worker", "cpu") else None
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = start_module(
                kind, module, arguments, env=env, stdout=log, stderr=subprocess.STDOUT
            )

    def _config_of(self, name: str) -> Path:
        own = self.folder / f"{name}.yaml"
        return own if own.exists() else self.folder / "cell.yaml"

    def stop(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def wait_serving(self) -> None:
        """Wait until the first layout serves."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise NotStartedError(f"{name} ended:\n{self.log(name)[-4000:]}")
            try:
                answer = self.get("/admin/layout")
                # A rank that is slow to start comes into a layout that serves without it.
                is_own = self.config.policy.name == "adaptive" and "off" not in answer["layout"]
                if answer["serving"] and (is_own or answer["layout"] == self.config.cell.layout):
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise NotStartedError(f"the cell does not serve:\n{self.log('worker')[-4000:]}")


@contextmanager
def bare_cell(
    folder: Path,
    *,
    ranks: int,
    engine_args: list[str],
    model: Path = MODEL,
    device: str = "cpu",
    mixed: tuple[str, ...] = (),
    policy: dict[str, Any] | None = None,
    slo: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    proxy_port: int | None = None,
    worker: str = "worker",
    led_by: str = "coordinator",
    **coordinator: Any,
) -> Iterator[BareCell]:
    """Run a cell for the length of the block by the modules `worker` and `led_by`.

    `limits` go into the configuration's `cell`; ranks look for their coordinator at `proxy_port`.
    """
    config = check_config(
        {
            "model": {"path": str(model), "served_name": "demo", "engine_args": engine_args},
            "cell": {
                "ranks": ranks,
                "device": device,
                "layout": f"dp{ranks}",
                "widths": [width for width in (1, 2, 4) if width <= ranks],
                "mixed": mixed,
                "dist_port": free_port(),
                "host_kv_gib": 0.0,
                **(limits or {}),
            },
            # Where ranks share cores with other work, one may be slow for no fault of its own.
            "coordinator": {
                "listen": f"127.0.0.1:{free_port()}",
                "slow_factor": 0,
                "renew_idle_ms": 0,
                **coordinator,
            },
            "policy": policy or {},
            "slo": slo or {},
            "admin": {"port": free_port()},
            "run_dir": str(folder),
        }
    )
    (folder / "cell.yaml").write_text(dump_config(config))
    if proxy_port is not None:
        listen = config.coordinator.model_copy(update={"listen": f"127.0.0.1:{proxy_port}"})
        of_ranks = config.model_copy(update={"coordinator": listen})
        (folder / "worker.yaml").write_text(dump_config(of_ranks))
    cell = BareCell(config, folder, worker=worker, coordinator=led_by)
    try:
        cell.start("coordinator")
        cell.start("worker")
        cell.wait_serving()
        yield cell
    finally:
        cell.stop()
    left = sorted(Path("/dev/shm").glob(f"{config.cell.dist_port}-*"))
    assert not left, "ranks leave nothing in shared memory"


@dataclass
class Stream:
    """What came back for one task."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each token, where logprobs were asked for."""
    prompt_logprobs: Any = None
    cached_tokens: int = 0
    finished: bool = False
    times: list[float] = field(default_factory=list)
    failure: str | None = None
    resumed: int = 0
    """How often it was submitted again after a rank was lost."""
    order: TokenStream[Any] = field(default_factory=TokenStream)
    overtaken: int = 0
    """Spans that came before one in front of them, from another leader."""


class TaskClient:
    """Submits requests to a coordinator and assembles what leaders push."""

    channel_options = wire.CHANNEL_OPTIONS

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self._tag = f"~{secrets.token_hex(3)}"
        """Behind the name in a task's id: a coordinator remembers the tasks of earlier clients."""
        self._up: asyncio.Queue[GatewayUp] = asyncio.Queue()
        self._reply_to = ""
        self._readers: list[asyncio.Task[None]] = []
        self._submitted: dict[str, Submit] = {}
        self._fences: dict[str, int] = {}
        """The highest attempt of each task whose tokens are taken no more."""

    @asynccontextmanager
    async def connected(
        self, cell: BareCell, link: FaultProxy | None = None
    ) -> AsyncIterator["TaskClient"]:
        """Hold a session for the length of the block; tokens come over `link` if there is one."""
        context = zmq.asyncio.Context()
        pull = context.socket(zmq.PULL)
        if link is None:
            port = pull.bind_to_random_port("tcp://127.0.0.1")
        else:
            pull.bind(f"tcp://{link.target}")
            port = link.port
        self._reply_to = f"tcp://127.0.0.1:{port}"
        channel = grpc.aio.insecure_channel(
            cell.config.coordinator.listen, options=self.channel_options
        )
        method = channel.stream_stream(
            wire.GATEWAY_PATH,
            request_serializer=wire.encode,
            response_deserializer=wire.decode_gateway_down,
        )
        self._up.put_nowait(GatewayHello(PROTOCOL_VERSION, "test"))
        call = method(self._messages(), metadata=((wire.TOKEN_METADATA_KEY, TOKEN),))
        readers = self._readers = [
            asyncio.create_task(self._read_tokens(pull)),
            asyncio.create_task(self._read_events(call)),
        ]
        for reader in readers:
            reader.add_done_callback(self._fail_all)
        try:
            yield self
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            await channel.close(None)
            context.destroy(linger=0)

    async def _messages(self) -> AsyncIterator[GatewayUp]:
        while True:
            yield await self._up.get()

    def _fail_all(self, reader: asyncio.Task[None]) -> None:
        """Let streams fail with the reader that fed them, not by their time limits."""
        if not reader.cancelled() and (error := reader.exception()) is not None:
            for stream in self.streams.values():
                if not stream.finished:
                    stream.failure, stream.finished = f"the reader failed: {error!r}", True

    async def _read_events(self, call: Any) -> None:
        async for message in call:
            if isinstance(message, TaskFailed):
                stream = self.streams[message.task.removesuffix(self._tag)]
                stream.failure, stream.finished = f"{message.code}: {message.message}", True
            if isinstance(message, Resubmit):
                self._submit_again(message)

    def _submit_again(self, asked: Resubmit) -> None:
        """A rank was lost: say what came of the task, and take nothing from earlier attempts."""
        stream = self.streams.get(asked.task.removesuffix(self._tag))
        if stream is None:
            self._up.put_nowait(Cancel(asked.task))  # Of a client before this one.
            return
        self._fences[asked.task] = max(asked.attempt, self._fences.get(asked.task, 0))
        if stream.finished:
            self._up.put_nowait(Done(asked.task))
            return
        stream.resumed += 1
        known = {"delivered_tokens": tuple(stream.tokens), "attempt": self._fences[asked.task]}
        again = msgspec.structs.replace(self._submitted[asked.task], **known)
        self._submitted[asked.task] = again
        self._up.put_nowait(again)

    async def _read_tokens(self, pull: Any) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder

        decoder = MsgpackDecoder(EngineCoreOutputs)
        while True:
            header, *frames = await pull.recv_multipart()
            batch = wire.decode_token_batch(header)
            for span, output in zip(batch.spans, decoder.decode(frames).outputs, strict=True):
                self._take(span, output)

    def _take(self, span: Any, output: Any) -> None:
        """Take a span in its turn: two leaders of one task reach us by connections of their own."""
        if span.attempt <= self._fences.get(span.task, 0):
            return
        stream = self.streams[span.task.removesuffix(self._tag)]
        answer = stream.order.offer(span)
        if answer is Verdict.HOLD:
            stream.order.hold(span, (span, output))
            stream.overtaken += 1
            return
        for verdict, (each, what) in [(answer, (span, output)), *stream.order.ready()]:
            is_cut = isinstance(verdict, Trim) and (verdict.skip, verdict.keep) != (0, each.count)
            if is_cut or verdict is Verdict.DROP:
                stream.failure, stream.finished = f"tokens were sent again: {each}", True
                return
            take(stream, each, what)

    def cancel(self, name: str) -> None:
        """Say that nobody waits for this task any more, as a gateway does for a gone client."""
        self._up.put_nowait(Cancel(TaskId(name + self._tag)))

    def submit(
        self, name: str, prompt: list[int], *, tier: Tier = Tier.STANDARD, **params: Any
    ) -> Stream:
        """Send one request with vLLM's sampling parameters; greedy unless told otherwise."""
        header, payload = encoded_request(name + self._tag, prompt, self._reply_to, tier, params)
        self.streams[name] = Stream()
        submit = Submit(header, payload, prefixes=prefix_hashes(prompt))
        self._submitted[header.task] = submit
        self._up.put_nowait(submit)
        return self.streams[name]

    def submitted(self, name: str) -> Submit:
        """Return the last submission of a task; after a loss it holds the delivered tokens."""
        return self._submitted[TaskId(name + self._tag)]

    async def timed(self, name: str, prompt: list[int], **params: Any) -> list[float]:
        """Run one request; returns when it was sent and when each batch of tokens came."""
        sent = time.perf_counter()
        stream = self.submit(name, prompt, **params)
        while not stream.finished:
            await asyncio.sleep(0.002)
        assert stream.failure is None, stream.failure
        return [sent, *stream.times]

    async def wait_first_tokens(self, *names: str) -> None:
        """Wait until these streams have a token each: the first steps may compile kernels."""
        deadline = time.monotonic() + TASK_LIMIT_S
        while not all(self.streams[name].tokens for name in names):
            assert time.monotonic() < deadline, {n: len(self.streams[n].tokens) for n in names}
            await asyncio.sleep(0.001)

    async def finish(self, *names: str) -> list[Stream]:
        """Wait until these streams are complete."""
        deadline = time.monotonic() + TASK_LIMIT_S
        while not all(self.streams[name].finished for name in names):
            for reader in self._readers:
                if reader.done():
                    reader.result()
            assert time.monotonic() < deadline, {n: len(self.streams[n].tokens) for n in names}
            await asyncio.sleep(0.005)
        for name in names:
            assert self.streams[name].failure is None, self.streams[name].failure
        return [self.streams[name] for name in names]


def take(stream: Stream, span: Any, output: Any) -> None:
    """Add one of vLLM's step outputs to a stream."""
    assert span.first == len(stream.tokens), (span, len(stream.tokens))
    stream.tokens += output.new_token_ids
    stream.times.append(time.perf_counter())
    if output.new_logprobs is not None:
        stream.logprobs += [float(row[0]) for row in output.new_logprobs.logprobs]
        if len(output.new_logprobs.logprob_token_ids[0]) > LOGPROBS_MAX:
            stream.logits += rows_of(output.new_logprobs)
    if output.new_prompt_logprobs_tensors is not None:
        stream.prompt_logprobs = output.new_prompt_logprobs_tensors
    if output.prefill_stats is not None:
        stream.cached_tokens = output.prefill_stats.num_cached_tokens
    stream.finished |= span.finished
