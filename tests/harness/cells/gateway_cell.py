"""A gateway process, and the rest of its cell in a thread of the test: coordinator and leaders.

The coordinator is a real gRPC server and the leader a real ZeroMQ socket with vLLM's own encoder;
what they do with a task is up to the test. Nothing of the product's coordinator or worker is used.
"""

import asyncio
import importlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx
import yaml
import zmq

from comm_pool.layout import Rank
from coordinator.protocol import wire
from coordinator.protocol.messages.gateway import (
    Cancel,
    CellState,
    Done,
    GatewayDown,
    GatewayHello,
    GatewayUp,
    Submit,
    Welcome,
)
from coordinator.protocol.messages.message import Message
from coordinator.protocol.messages.rank import TokenBatch, TokenSpan
from coordinator.protocol.terms import TaskId
from tests.harness.cells.warm import start_module

Result = TypeVar("Result")
Seen = TypeVar("Seen", bound=Message)

TOKEN = "a-secret-for-tests-only"
SERVING = CellState("dp2", 1, True, 2, 2, 0, 2_048)
START_S = 180
SEEN_S = 5
WAITED_MS = 7
"""How long tasks waited, as the cell says with their first tokens."""
ENGINE_FINISHED = {None: None, "stop": 0, "length": 1}


@dataclass
class Ran:
    """A task as the leader has it; `request` is vLLM's, decoded from the payload."""

    submit: Submit
    request: Any
    push: Callable[..., None]

    @property
    def id(self) -> TaskId:
        return self.submit.header.task

    def tokens(self, first: int, ids: list[int], end: str | None = None, **how: Any) -> None:
        """Push one batch with one span."""
        self.push([self.part(first, ids, end, attempt=how.pop("attempt", 1), **how)], **how)

    def part(
        self,
        first: int,
        ids: list[int],
        end: str | None = None,
        *,
        attempt: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **_: Any,
    ) -> tuple[TokenSpan, Any]:
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        reason = ENGINE_FINISHED[end]
        output = EngineCoreOutput(
            request_id=self.id,
            new_token_ids=ids,
            new_logprobs=None if logprobs is None else some_logprobs(first, ids, logprobs),
            new_prompt_logprobs_tensors=self._of_prompt(prompt_logprobs),
            finish_reason=None if reason is None else FinishReason(reason),
        )
        waited_ms = 0 if first else WAITED_MS
        span = TokenSpan(self.id, attempt, first, len(ids), reason is not None, waited_ms)
        return span, output

    def _of_prompt(self, top: int | None) -> Any:
        import torch
        from vllm.v1.outputs import LogprobsTensors

        behind_first = self.request.prompt_token_ids[1:]
        if top is None or not behind_first:
            return None
        arrays = some_logprobs(0, behind_first, top)
        return LogprobsTensors(*(torch.from_numpy(each) for each in arrays[:3]))


def some_logprobs(first: int, ids: list[int], top: int) -> Any:
    """Log probabilities that tell their index: token i has -(i + 1) / 100."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    others = [[token, *range(1, top + 1)] for token in ids]
    values = [
        [-(first + place + 1) / 100, *(-5.0 - rank for rank in range(top))]
        for place, _ in enumerate(ids)
    ]
    return LogprobsLists(
        np.array(others, dtype=np.int32),
        np.array(values, dtype=np.float32),
        np.ones(len(ids), dtype=np.int32),
    )


Behaviour = Callable[[Ran], Awaitable[None]]


@dataclass
class FakeCell:
    """The coordinator and the leader; methods may be called from the test's thread."""

    behave: Behaviour | None = None
    """What happens to each submitted task."""
    coordinator: str = "first"
    state: CellState = SERVING
    mute: bool = False
    """Accept sessions but do not answer the hello."""
    seen: list[GatewayUp] = field(default_factory=list)
    sessions: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls: set[Any] = set()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self.call(self._listen(0))

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        future: Future[Result] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(timeout=30)

    def of(self, kind: type[Seen]) -> list[Seen]:
        """Messages of one kind, oldest first."""
        return [message for message in list(self.seen) if isinstance(message, kind)]

    async def until(self, condition: Callable[[], Any], within_s: float = SEEN_S) -> Any:
        """Wait until the condition holds; return what it gave."""
        deadline = time.monotonic() + within_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not seen in {within_s} s: {self.seen}"
            await asyncio.sleep(0.01)
        return value

    def say(self, message: GatewayDown) -> None:
        """Send a message in every open session."""
        self._loop.call_soon_threadsafe(self._say, message)

    def _say(self, message: GatewayDown) -> None:
        for queue in self._calls:
            queue.put_nowait(message)

    def set_state(self, state: CellState) -> None:
        self.state = state
        self.say(state)

    def go_away(self) -> None:
        """Stop listening and break every session."""
        self.call(self._server.stop(None))

    def come_back(self) -> None:
        """Listen again, at the same port."""
        self.call(self._listen(self.port))

    def reset(self) -> None:
        self.behave = None
        self.seen.clear()
        self.set_state(SERVING)

    def close(self) -> None:
        self.go_away()
        self.call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._context.destroy(linger=0)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _listen(self, port: int) -> int:
        self._server = grpc.aio.server(options=[*wire.CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
        method = grpc.stream_stream_rpc_method_handler(
            self._session,
            request_deserializer=wire.decode_gateway_up,
            response_serializer=wire.encode,
        )
        handlers = {wire.GATEWAY_METHOD: method}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, handlers),)
        )
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return port

    async def _session(
        self, messages: AsyncIterator[GatewayUp], context: Any
    ) -> AsyncIterator[GatewayDown]:
        if dict(context.invocation_metadata()).get(wire.TOKEN_METADATA_KEY) != TOKEN:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
        queue: asyncio.Queue[GatewayDown] = asyncio.Queue()
        reader = asyncio.create_task(self._read(messages, queue))
        self._calls.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._calls.discard(queue)
            reader.cancel()

    async def _read(
        self, messages: AsyncIterator[GatewayUp], queue: "asyncio.Queue[GatewayDown]"
    ) -> None:
        async for message in messages:
            self.seen.append(message)
            if isinstance(message, GatewayHello) and not self.mute:
                self.sessions += 1
                queue.put_nowait(Welcome(self.coordinator))
                queue.put_nowait(self.state)
            elif isinstance(message, Submit) and self.behave is not None:
                work = asyncio.ensure_future(self._run(self.behave, message))
                self._tasks.add(work)
                work.add_done_callback(self._tasks.discard)

    async def _run(self, behave: Behaviour, submit: Submit) -> None:
        await behave(self.ran(submit))

    def ran(self, submit: Submit) -> Ran:
        """The leader's view of a submitted task."""
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder

        frames = wire.decode_frames(submit.payload)
        request = MsgpackDecoder(EngineCoreRequest).decode(list(frames))
        return Ran(submit, request, lambda parts, **how: self.push(submit, parts, **how))

    def push(
        self, submit: Submit, parts: list[tuple[TokenSpan, Any]], *, epoch: int = 1, **_: Any
    ) -> None:
        """Push a batch to the gateway that submitted a task; only from the cell's own thread."""
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackEncoder

        header = TokenBatch(Rank(0), 1, epoch, tuple(span for span, _ in parts))
        outputs = EngineCoreOutputs(outputs=[output for _, output in parts])
        frames = [wire.encode(header), *MsgpackEncoder().encode(outputs)]
        self.push_frames(submit.header.reply_to, [bytes(frame) for frame in frames])

    def push_frames(self, address: str, frames: list[bytes]) -> None:
        if address not in self._sockets:
            self._sockets[address] = self._context.socket(zmq.PUSH)
            self._sockets[address].connect(address)
        self._sockets[address].send_multipart(frames)

    def on_leader(self, work: Callable[[], None]) -> None:
        """Run something in the cell's thread, to its end."""

        async def run() -> None:
            work()

        self.call(run())


async def text_of(answer: Any) -> str:
    """The text of a chat stream that ran to its limit."""
    chunks = [chunk.choices[0] async for chunk in answer if chunk.choices]
    assert chunks[-1].finish_reason == "length"
    return "".join(chunk.delta.content or "" for chunk in chunks)


class GatewayProcess:
    """`python -m gateway` with a configuration of its own, or another module that runs it."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        cell: FakeCell,
        *,
        module: str = "gateway",
        fleet: dict[str, Any] | None = None,
        warm: bool = True,
        env: Mapping[str, str] | None = None,
        other_names: Sequence[str] = (),
        engine_args: Sequence[str] = ("--max-model-len", "512"),
        batches: Mapping[str, Any] | None = None,
        logging: Mapping[str, Any] | None = None,
        **gateway: Any,
    ) -> None:
        """Where its memory is measured it is not `warm`: a forked one's heap is another's.

        `env` is added to the environment; `engine_args` are vLLM's options.
        """
        self.log = folder / "gateway.log"
        config = {
            "model": {
                "path": str(model),
                "served_name": "demo",
                "other_names": list(other_names),
                "engine_args": list(engine_args),
            },
            "coordinator": {"listen": f"127.0.0.1:{cell.port}"},
            "gateway": {"port": 0, **gateway},
            "fleet": fleet or {},
            "batches": dict(batches or {}),
            "log": dict(logging or {}),
            "run_dir": str(folder),
        }
        path = folder / "gateway.yaml"
        path.write_text(yaml.safe_dump(config))
        with self.log.open("wb") as log:
            self.process = start_module(
                "gateway" if warm else None,
                module,
                ["--config", str(path)],
                env={**os.environ, "AILERON_TOKEN": TOKEN, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=log,
            )
        # What the leader needs takes seconds to import; the gateway starts meanwhile.
        importlib.import_module("vllm.v1.serial_utils")
        self.facts = self._wait_ready()
        self.url: str = self.facts["url"]
        self.port: int = self.facts["port"]
        # A fleet's gateway knows no cell before a test announces one.
        if cell.state.serving and not cell.mute and not fleet:
            self._wait_serving()

    def _wait_ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line, f"the gateway did not start: {self.log.read_text()[-4_000:]}"
        facts: dict[str, Any] = json.loads(line)
        return facts

    def _wait_serving(self) -> None:
        """Wait for the cell's state: the process listens a moment before it has its session."""
        deadline = time.monotonic() + START_S
        while httpx.get(f"{self.url}/ready", verify=False).status_code != httpx.codes.OK:
            if time.monotonic() > deadline:
                self.close()  # The test has no object to end it by.
                raise AssertionError(f"not serving: {self.log.read_text()[-4_000:]}")
            time.sleep(0.01)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout=timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


__all__ = ["SERVING", "TOKEN", "Cancel", "Done", "FakeCell", "GatewayProcess", "Ran"]
