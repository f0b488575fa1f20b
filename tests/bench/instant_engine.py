"""An engine that computes nothing, for benchmarks of what is in front of it.

`python -m tests.bench.instant_engine cell` stands for a cell's coordinator and leader, and prints
its port; `... vllm IN OUT` stands for the engine core of vLLM's API server, at these two ZeroMQ
addresses. Both read no more of a request than its id and its number of tokens. A task gets its
first token at once and then, as from an engine, one in every step of all tasks.
"""

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from coordinator.protocol.messages.gateway import (
    Cancel,
    CellState,
    GatewayDown,
    GatewayHello,
    GatewayUp,
    Submit,
    Welcome,
)
from coordinator.protocol.terms import TaskId
from tests.harness.cells.gateway_cell import FakeCell

STEP_S = 0.02
TOKEN_ID = 300
"""Its text is some letters, in the demo model's vocabulary."""
SLOTS = 1_024
"""Free places that the cell reports, so that nothing is queued."""


class Steps:
    """Who gets a token when; `push` sends one token each to tasks, with its index and its end.

    `name` returns a task's id.
    """

    def __init__(
        self,
        push: Callable[[Sequence[tuple[Any, int, bool]]], None],
        name: Callable[[Any], str],
    ) -> None:
        self._push = push
        self._name = name
        self._running: list[tuple[Any, int, int]] = []
        """Tasks, the index of the next token, and the number of all."""
        self._stepping: asyncio.Task[None] | None = None

    def take(self, task: Any, tokens: int) -> None:
        """Give a new task its first token."""
        self._push([(task, 0, tokens == 1)])
        if tokens > 1:
            self._running.append((task, 1, tokens))
            if self._stepping is None:
                self._stepping = asyncio.create_task(self._step())

    def drop(self, task_id: str) -> None:
        """Give a task that nobody waits for no more tokens."""
        self._running = [each for each in self._running if self._name(each[0]) != task_id]

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while self._running:
            due_s = max(due_s + STEP_S, loop.time())
            await asyncio.sleep(due_s - loop.time())
            running, self._running = self._running, []
            if not running:
                break
            self._push([(task, index, index + 1 == most) for task, index, most in running])
            self._running += [
                (task, index + 1, most) for task, index, most in running if index + 1 < most
            ]
        self._stepping = None


class InstantCell(FakeCell):
    """A cell without an engine that does not look into the requests."""

    def __post_init__(self) -> None:
        self.state = CellState("dp1", 1, True, 1, 1, 0, SLOTS)
        self._steps = Steps(self._push_all, lambda submit: submit.header.task)
        super().__post_init__()

    async def _read(
        self, messages: AsyncIterator[GatewayUp], queue: "asyncio.Queue[GatewayDown]"
    ) -> None:
        async for message in messages:
            match message:
                case GatewayHello():
                    queue.put_nowait(Welcome(self.coordinator))
                    queue.put_nowait(self.state)
                case Submit(header):
                    self._steps.take(message, header.max_tokens)
                case Cancel(task):
                    self._steps.drop(task)

    def _push_all(self, tokens: Sequence[tuple[Submit, int, bool]]) -> None:
        from coordinator.protocol.messages.rank import TokenSpan

        parts = [
            (
                TokenSpan(submit.header.task, 1, index, 1, is_last, 0),
                _output(submit.header.task, is_last),
            )
            for submit, index, is_last in tokens
        ]
        self.push(tokens[0][0], parts)


def _output(task: str, is_last: bool) -> Any:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    reason = FinishReason.LENGTH if is_last else None
    return EngineCoreOutput(request_id=task, new_token_ids=[TOKEN_ID], finish_reason=reason)


class _Head(msgspec.Struct, array_like=True):
    """The first fields of vLLM's `EngineCoreRequest`."""

    request_id: str
    prompt_token_ids: msgspec.Raw
    mm_features: msgspec.Raw
    sampling_params: msgspec.Raw


class _Limit(msgspec.Struct):
    max_tokens: int


async def serve_vllm(input_address: str, output_address: str, ready: bytes) -> None:
    """Stand for the engine core until the process ends."""
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
    from vllm.v1.serial_utils import MsgpackEncoder

    from gateway.engine import wire
    from gateway.engine.wire import ENGINE_IDENTITY

    context = zmq.asyncio.Context()
    requests = context.socket(zmq.DEALER)
    requests.setsockopt(zmq.IDENTITY, ENGINE_IDENTITY)
    requests.connect(input_address)
    outputs = zmq.Context().socket(zmq.PUSH)
    outputs.connect(output_address)
    encode = MsgpackEncoder().encode
    await requests.send(ready)

    def push(tokens: Sequence[tuple[TaskId, int, bool]]) -> None:
        parts = [_output(task, is_last) for task, _, is_last in tokens]
        frames = encode(EngineCoreOutputs(outputs=parts))
        outputs.send_multipart([bytes(frame) for frame in frames])

    steps = Steps(push, str)
    while True:
        kind, *frames = await requests.recv_multipart()
        if kind == EngineCoreRequestType.ADD.value:
            head = msgspec.msgpack.decode(frames[0], type=_Head)
            limit = msgspec.msgpack.decode(head.sampling_params, type=_Limit)
            steps.take(head.request_id, limit.max_tokens)
        elif kind == EngineCoreRequestType.ABORT.value:
            for task in msgspec.msgpack.decode(frames[0], type=list[str]):
                steps.drop(task)
        elif (call := wire.decode_call([kind, *frames])) is not None:
            outputs.send_multipart(wire.answer_utility(call))


def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cell", "vllm"])
    parser.add_argument("addresses", nargs="*")
    arguments = parser.parse_args()
    if arguments.what == "vllm":
        requests, outputs, ready = arguments.addresses
        asyncio.run(serve_vllm(requests, outputs, bytes.fromhex(ready)))
        return
    _output("imports vLLM before the first request", is_last=True)
    cell = InstantCell()
    print(json.dumps({"port": cell.port}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
