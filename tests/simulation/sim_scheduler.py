"""The scheduler of a simulated rank: tokens are drawn at random, and say what they continue.

A leader that goes on from other tokens than the client has is found out, even if indices look
right: each output has the digest of the tokens before it.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from coordinator.protocol.terms import Binding
from tests.harness.worker.fake_scheduler import (
    FakeIntake,
    FakeOutput,
    FakePlan,
    FakeRequest,
    FakeScheduler,
)
from tests.simulation.checkers import digest
from worker.rank.engine import LeaseIndices, Tokens
from worker.rank.task_state import Blocks, CachedChain, RunningState

if TYPE_CHECKING:
    from tests.simulation.open_steps import OpenStep


@dataclass
class SimPlan(FakePlan):
    """A step as all members see it: they share the object."""

    stays: Mapping[str, int] = field(default_factory=dict)
    """Task -> the number of its stay, in whose name its KV is written."""
    binding: Binding | None = None
    """The formation that its leader is in."""
    table: frozenset[int] = frozenset()
    """The leader's lease indices."""
    step: "OpenStep | None" = None


@dataclass(frozen=True)
class SimOutput(FakeOutput):
    """One token, and the digest of all before it."""

    before: int


class SimRequest(FakeRequest):
    """A task; its KV is that of one stay, until it is computed anew."""

    stay = 0


class SimIntake(FakeIntake):
    """See `Intake`."""

    def request(self, payload: bytes) -> SimRequest:
        """See `Intake`, as all that follows."""
        plain = super().request(payload)
        return SimRequest(plain.name, plain.prompt, plain.max_tokens, plain.moves)

    def continued_request(self, payload: bytes, state: RunningState) -> FakeRequest:
        request = super().continued_request(payload, state)
        assert isinstance(request, SimRequest)
        request.stay = state.prefill_stats
        return request


class SimScheduler(FakeScheduler):
    """See `EngineScheduler`."""

    stays: "itertools.count[int]"
    """Numbers of stays, of the whole world."""
    adopted = 0
    """How many tasks it has continued."""

    def add_task(self, request: Any, generated: list[int]) -> None:
        """See `EngineScheduler`, as all that follows."""
        request.stay = next(self.stays)
        super().add_task(request, generated)

    def adopt(
        self,
        tasks: Iterable[tuple[Any, Blocks]],
        chains: Sequence[CachedChain],
        granted: LeaseIndices,
        indices: LeaseIndices,
        known: Mapping[str, Tokens] | None = None,
    ) -> None:
        tasks = list(tasks)
        self.adopted += len(tasks)
        super().adopt(tasks, chains, granted, indices, known)

    def _state(self, request: FakeRequest) -> RunningState:
        assert isinstance(request, SimRequest)
        return replace(super()._state(request), prefill_stats=request.stay)

    def plan_step(self) -> SimPlan:
        plan = super().plan_step()
        stays: dict[str, int] = {
            part.name: _stay_of(self.requests[part.name]) for part in plan.parts
        }
        return SimPlan(plan.parts, plan.ended, plan.number, plan.mode, stays)

    def finish_step(self, plan: FakePlan, tokens: Mapping[str, int]) -> list[FakeOutput]:
        held = dict(self.requests)
        return [
            SimOutput(
                each.request_id,
                each.new_token_ids,
                each.finished,
                digest_of(held[each.request_id].tokens[:-1]),
            )
            for each in super().finish_step(plan, tokens)
        ]


def _stay_of(request: FakeRequest) -> int:
    assert isinstance(request, SimRequest)
    return request.stay


def digest_of(tokens: Iterable[int]) -> int:
    """Return the digest of a stream's first tokens."""
    found = 0
    for token in tokens:
        found = digest(found, token)
    return found
