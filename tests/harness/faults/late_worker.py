"""`python -m worker` on CPU whose steps are computed later than they are launched, as on CUDA.

Every rank gets a thread that stands for its device: steps are computed there, in the order in which
they were launched, each a while after the one before it. So groups are left, and KV is copied,
while steps are under way and write into it. Another thread stands for the stream of its copies, so
that they, too, are made a while after they were launched: groups are joined while they are.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import Any, cast

from worker.__main__ import FIXED_ENVIRONMENT, VLLM_ENVIRONMENT, main

# As `main` does before it imports vLLM.
os.environ.update({**VLLM_ENVIRONMENT, **os.environ, **FIXED_ENVIRONMENT})

import torch

from comm_pool.pool import activate
from kvadaptor.transfer.unit_copy import ArrayCopier
from kvadaptor.transfer.unit_copy import Copies as Job
from kvadaptor.translate import translate
from worker.engine.mode import PreparedMode
from worker.engine.rank_engine import RankEngine
from worker.rank.loop import RankLoop

LATE_S = 0.015
"""How long a step waits on the device before it is computed."""


COPY_LATE_S = 0.02
"""How long copies wait before they are made."""


class Copies(ArrayCopier):
    """The stream of copies of one rank."""

    is_asynchronous = True

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self._stream = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copies")
        self.last: Future[None] = Future()
        self.last.set_result(None)

    def copy(self, jobs: Sequence[Job], unit_bytes: int) -> None:
        """Launch them."""

        def make() -> None:
            time.sleep(COPY_LATE_S)
            ArrayCopier.copy(self, jobs, unit_bytes)

        self.last = self._stream.submit(make)

    def finish(self) -> float:
        """Wait until they are made."""
        self.last.result()
        return super().finish()


class Ticket:
    """A launched step: what vLLM's asynchronous output is on CUDA."""

    def __init__(self, compute: Callable[[], Any], wait_s: float) -> None:
        self._compute = compute
        self._wait_s = wait_s
        self._done = threading.Event()
        self._output: Any = None
        self._error: Exception | None = None
        self.copy_event = self

    def run(self) -> None:
        """On the device's thread."""
        time.sleep(self._wait_s)
        try:
            self._output = self._compute()
        except Exception as error:  # noqa: BLE001 -- the main loop's to raise
            self._error = error
        self._done.set()

    def query(self) -> bool:
        """Whether its tokens are there."""
        return self._done.is_set()

    def get_output(self) -> Any:
        """Wait for them."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._output


class Device:
    """Computes what was launched, in order, with the group active that it was launched in."""

    def __init__(self, engine: RankEngine) -> None:
        self._engine = engine
        self._formation: dict[int, int] = {}
        self._queue: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._last: Ticket | None = None
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def _run(self) -> None:
        torch.set_num_threads(self._engine.spec.threads)  # Counts per thread.
        while True:
            self._queue.get().run()

    def select(self, width: int, formation: int = 0, stages: int = 1) -> PreparedMode:
        """Steps that are launched from now on belong to this formation."""
        self._formation[width] = formation
        return self._engine.of_width(width)

    def launch(self, mode: PreparedMode, plan: Any) -> Ticket:
        """Let a step be computed when its turn comes; block ids are those of now."""
        output = plan.output if mode.table is None else translate(plan.output, mode.table)
        formation = self._formation[mode.key.width]
        grammar = deepcopy(plan.grammar)  # vLLM fills one buffer with the masks of every step.

        def compute() -> Any:
            self._engine.communicators.enter(formation)
            activate(mode.communicator)
            mode.runner.use(plan.mode, reads_prompts=plan.reads_prompts)
            return mode.runner.run(output, grammar, plan.resuming, plan.known)

        ticket = Ticket(compute, 0.0 if plan.is_empty else LATE_S)
        self._add(ticket)
        return ticket

    def mark(self, copies: Copies) -> Callable[[], None]:
        """What lets what is launched later wait for the copies that were launched until now."""
        last = copies.last
        return lambda: self._add(Ticket(last.result, 0.0))

    def meet(self, width: int) -> None:
        """Let what is launched from now on wait for the other members."""
        formation, mode = self._formation[width], self._engine.of_width(width)

        def compute() -> None:
            self._engine.communicators.enter(formation)
            mode.communicator.group.all_reduce(torch.zeros(1))

        self._add(Ticket(compute, 0.0))

    def _add(self, ticket: Ticket) -> None:
        self._last = ticket
        self._queue.put(ticket)

    def done(self) -> Callable[[], bool]:
        """What tells whether all that was launched until now has been computed."""
        last = self._last
        return lambda: last is None or last.query()


def install() -> None:
    """Give every rank that is started from this process such a device."""
    run = RankLoop.run

    def with_device(self: RankLoop) -> None:
        device = Device(cast(RankEngine, self.core.engine))
        engine: Any = RankEngine
        engine.select = lambda _, *given, **named: device.select(*given, **named)
        engine.done = lambda _: device.done()
        engine.holds_steps = False
        copies = Copies(self.core.engine.kv.geometry.num_layers)
        mover: Any = self.core.engine.mover
        mover._copier = copies
        engine.mark = lambda _: device.mark(copies)
        engine.meet = lambda _, width: device.meet(width)
        mode: Any = PreparedMode
        mode.execute = device_launch(device)
        run(self)

    loop: Any = RankLoop
    loop.run = with_device


def device_launch(device: Device) -> Callable[[PreparedMode, Any], Ticket]:
    """What `PreparedMode.execute` is from now on."""
    return lambda mode, plan: device.launch(mode, plan)


if __name__ == "__main__":
    install()
    sys.exit(main())
