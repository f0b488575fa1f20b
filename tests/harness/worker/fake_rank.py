"""A rank's runtime over an engine in memory, which is driven by the test as its main loop would."""

from collections.abc import Sequence
from typing import Any

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.rank import Place, TokenBatch
from coordinator.protocol.terms import Binding
from tests.harness.coordinator.builders import header
from tests.harness.worker.fake_engine import FakeCell, FakeEngine
from tests.harness.worker.fake_scheduler import fake_payload
from tests.harness.worker.virtual_host import VirtualHost
from worker.rank.runtime import GroupRuntime

PROMPT = tuple(range(40))


def binding_of(first: int, width: int, formation: int, stages: int = 1) -> Binding:
    """Return the dp, tp or pipeline group of these ranks."""
    ranks = tuple(map(Rank, range(first, first + width)))
    if stages > 1:
        return Binding(Group(ranks, Mode.PP, width // stages), formation)
    return Binding(Group(ranks, Mode.DP if width == 1 else Mode.TP), formation)


class FakeRank:
    """One rank; `streams` are the tokens that were sent, by task, by all ranks that share them."""

    def __init__(
        self, cell: FakeCell, rank: int = 0, streams: dict[str, list[int]] | None = None
    ) -> None:
        self.engine: FakeEngine = cell.engines[Rank(rank)]
        self.streams: dict[str, list[int]] = {} if streams is None else streams
        self.pushed: list[tuple[int, list[str]]] = []
        """(epoch, tasks) of each batch."""
        # A limit in seconds ends nothing because the machine that runs the tests was slow.
        self.runtime = GroupRuntime(self.engine, 1, self, VirtualHost())

    def push(self, _reply_to: str, batch: TokenBatch, outputs: Sequence[Any]) -> None:
        """See `TokenSink`; a stream has no gap and no token twice."""
        self.pushed.append((batch.epoch, [span.task for span in batch.spans]))
        for span, output in zip(batch.spans, outputs, strict=True):
            stream = self.streams.setdefault(span.task, [])
            assert (span.task, span.first) == (output.request_id, len(stream))
            assert span.count == len(output.new_token_ids)
            stream += output.new_token_ids

    def serve(self, binding: Binding, pages: int = 8) -> None:
        """Join a group that this rank leads, and let it serve."""
        self.runtime.join(binding)
        self.runtime.serve(binding, (), pages)

    def place(
        self,
        name: str,
        binding: Binding,
        *,
        prompt: Sequence[int] = PROMPT,
        tokens: int = 9,
        generated: tuple[int, ...] = (),
        attempt: int = 1,
    ) -> None:
        """Give the rank a task of the group that it serves."""
        given = header(name, prompt=len(prompt), max_tokens=tokens)
        payload = fake_payload(name, prompt, tokens)
        self.runtime.place(Place(given, attempt, binding, payload, generated), binding)

    def step(self, epoch: int = 1) -> None:
        """Lead a step."""
        self.runtime.lead_step(epoch)
