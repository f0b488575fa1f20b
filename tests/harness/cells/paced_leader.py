"""A leader that pushes one token of all its tasks at a time, and the next when that was taken.

One that does not wait fills the gateway's token socket wherever the machine is slower than it is.
Up to 10,000 pushes may wait there, and libzmq keeps a receive buffer of 8 KiB for each that came
alone: up to 80 MiB that say how busy the machine is, and nothing of what a test measures.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.protocol.messages.gateway import Cancel, Submit
from coordinator.protocol.messages.rank import TokenSpan
from coordinator.protocol.terms import TaskId
from tests.harness.cells.gateway_cell import FakeCell, Ran

TAKEN_WITHIN_S = 60.0
FIRST_TOKEN_ID = 300


@dataclass
class PacedLeader:
    """Runs every task of one gateway to its `max_tokens`; its `serve` is a cell's behaviour."""

    cell: FakeCell
    step_s: float
    """Least time from one token to the next."""
    logprobs: int
    """Most likely tokens that each token tells."""
    behind_step: Callable[[], None] = lambda: None
    """Called in the cell's thread each time when the gateway has taken a step's tokens."""
    steps: int = 0
    is_idle: bool = True
    _running: list[tuple[Ran, int]] = field(default_factory=list)
    """Tasks, with the index of each one's next token."""

    async def serve(self, ran: Ran) -> None:
        """Take a task; the first one's coroutine makes the steps of all."""
        self._running.append((ran, 0))
        if not self.is_idle:
            return
        self.is_idle = False
        while self._running:
            await asyncio.gather(self._step(), asyncio.sleep(self.step_s))
            self.behind_step()
        self.is_idle = True

    async def _step(self) -> None:
        cancelled = {cancel.task for cancel in self.cell.of(Cancel)}
        stepped = [(ran, index) for ran, index in self._running if ran.id not in cancelled]
        parts = []
        self._running = []
        for ran, index in stepped:
            is_last = index + 1 == ran.request.sampling_params.max_tokens
            end = "length" if is_last else None
            parts.append(ran.part(index, [FIRST_TOKEN_ID + index], end, logprobs=self.logprobs))
            if not is_last:
                self._running.append((ran, index + 1))
        self.steps += 1
        if stepped:
            submit = stepped[0][0].submit
            self.cell.push(submit, parts)
            await self._taken(submit)

    async def _taken(self, submit: Submit) -> None:
        """A gateway says of a task that it does not know that it is cancelled, in its turn."""
        from vllm.v1.engine import EngineCoreOutput

        stray = TaskId(f"stray-{self.steps}")
        output = EngineCoreOutput(request_id=stray, new_token_ids=[FIRST_TOKEN_ID])
        self.cell.push(submit, [(TokenSpan(stray, 1, 0, 1, False), output)])
        await self.cell.until(lambda: Cancel(stray) in self.cell.of(Cancel), TAKEN_WITHIN_S)
