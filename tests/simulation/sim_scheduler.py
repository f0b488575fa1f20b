"""The scheduler of a simulated rank: tokens are drawn at random, and say what they continue.

A leader that goes on from other tokens than the client has is found out, even if indices look
right: each output has the digest of the tokens before it.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from coordinator.protocol.terms import Binding
from tests.harness.worker.fake_scheduler import (
    FakeIntake,
    FakeOutput,
    FakePlan,
    FakeRequest,
    FakeScheduler,
    Part,
)
from tests.simulation.checkers import digest
from tests.simulation.lost_blocks import GroupBlocks, Loads, extend_keys
from tests.simulation.sim_kv import BLOCK_TOKENS, Stay
from worker.rank.engine import LeaseIndices, Tokens
from worker.rank.task_state import Blocks, CachedChain, RunningState

if TYPE_CHECKING:
    from tests.simulation.open_steps import OpenStep


@dataclass
class SimPlan(FakePlan):
    """A step as all members see it: they share the object."""

    stays: Mapping[str, Stay] = field(default_factory=dict)
    """Task -> its stay, in whose name its KV is written."""
    loads: Loads = field(default_factory=Loads)
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
    """A task; its KV is that of one stay, after what it has loaded, until it is computed anew."""

    stay = Stay(0)
    states = 0
    """How many states of its task it was brought to, one after the other."""

    def __init__(self, name: str, prompt: list[int], max_tokens: int, moves: bool) -> None:
        super().__init__(name, prompt, max_tokens, moves)
        self._keys: list[bytes] = []

    def keys(self, blocks: int) -> list[bytes]:
        """Return the keys of its first full blocks, up to this number, whose tokens are known."""
        if len(self._keys) < blocks:
            extend_keys(self._keys, self.prompt + self.tokens, blocks)
        return self._keys[:blocks]

    def catch_up(self, state: RunningState) -> None:
        """See `Continuation`."""
        super().catch_up(state)
        self.stay = state.prefill_stats
        self.states += 1


class SimIntake(FakeIntake):
    """See `Intake`."""

    def request(self, payload: bytes) -> SimRequest:
        """See `Intake`."""
        plain = super().request(payload)
        return SimRequest(plain.name, plain.prompt, plain.max_tokens, plain.moves)


class SimScheduler(FakeScheduler):
    """See `EngineScheduler`."""

    stays: "itertools.count[int]"
    """Numbers of stays, of the whole world."""
    adopted = 0
    """How many tasks it has continued."""
    blocks: GroupBlocks | None = None
    """Its full blocks in the directory of its group; None where KV ends with its process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._not_entered: list[tuple[SimRequest, int, int]] = []
        """Continued tasks, their full blocks by then, and how often they were preempted."""
        self._in_doubt: SimPlan | None = None
        """The step in flight that loads from lost groups."""

    @property
    def may_be_void(self) -> bool:
        return self._in_doubt is not None

    @property
    def has_more(self) -> bool:
        return not self.may_be_void and super().has_more

    def add_task(self, request: Any, generated: list[int], *, is_promoted: bool = False) -> None:
        """See `EngineScheduler`, as all that follows."""
        request.stay = Stay(next(self.stays))
        super().add_task(request, generated, is_promoted=is_promoted)

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
        for request, _ in tasks if self.blocks is not None else ():
            full = request.computed // BLOCK_TOKENS
            self._not_entered.append((request, full, request.preemptions))

    def _state(self, request: FakeRequest) -> RunningState:
        assert isinstance(request, SimRequest)
        return replace(super()._state(request), prefill_stats=request.stay)

    def plan_step(self) -> SimPlan:
        plain = super().plan_step()
        stays: dict[str, Stay] = {part.name: self._request(part.name).stay for part in plain.parts}
        plan = SimPlan(plain.parts, plain.ended, plain.number, plain.mode, stays)
        if self.blocks is not None:
            plan.loads = self.blocks.take_loads()
            for part in plan.parts:
                first = 0 if part.name in plan.loads.tasks else part.start // BLOCK_TOKENS
                self._enter(self._request(part.name), first, part.start + part.count)
            if self.stages == 1 or not plan.is_void:
                # Nobody finishes a void step of a pipeline group.
                self.blocks.entries.step_is_planned(plan)
            if plan.loads.tasks:
                self._in_doubt = plan
        return plan

    def finish_step(self, plan: FakePlan, tokens: Mapping[str, int]) -> list[FakeOutput]:
        assert isinstance(plan, SimPlan)
        counted: FakePlan = plan
        if self.blocks is not None:
            if self._in_doubt is plan:
                self._in_doubt = None
            void = self.blocks.look_again(plan.loads)
            with self.blocks.entries.of_finished_step(plan, is_void=bool(void)):
                pass  # Here all blocks have their hashes when a step is planned.
            if void:
                counted = replace(plan, parts=tuple(self._without_void(plan, void)))
        held = dict(self.requests)
        outputs = super().finish_step(counted, tokens)
        if self.blocks is not None:
            for request, full, preemptions in self._not_entered:
                is_here = self.requests.get(request.name) is request
                if is_here and request.preemptions == preemptions:
                    self._enter(request, 0, full * BLOCK_TOKENS)
            self._not_entered.clear()
        return [
            SimOutput(
                each.request_id,
                each.new_token_ids,
                each.finished,
                digest_of(held[each.request_id].tokens[:-1]),
            )
            for each in outputs
        ]

    # ------------------------------------------------------------------ blocks of groups

    def _enter(self, request: SimRequest, first: int, tokens: int) -> None:
        """Enter the full blocks of a task's first tokens, from block `first` on."""
        assert self.blocks is not None
        last = tokens // BLOCK_TOKENS
        for number, key in enumerate(request.keys(last)[first:], first):
            self.blocks.add(request.blocks[number], key, request.stay.of(number))

    def _part(self, request: FakeRequest, room: int, *, preempts: bool) -> Part | None:
        """Look up a task that has no KV, as vLLM asks its connector."""
        if self.blocks is None or request.computed:
            return super()._part(request, room, preempts=preempts)
        assert isinstance(request, SimRequest)
        # The last token is always computed: its logits give the next one.
        found = self.blocks.find(request.keys((request.length - 1) // BLOCK_TOKENS))
        request.computed = len(found) * BLOCK_TOKENS
        part = super()._part(request, room, preempts=preempts)
        if part is None:
            request.computed = 0
            return None
        request.stay = Stay(request.stay.number, tuple(stay for _, stay in found))
        if found:
            self.blocks.load(request, [place for place, _ in found])
        return part

    def _without_void(self, plan: SimPlan, void: set[int]) -> Iterator[Part]:
        """Yield the parts that count; other tasks are computed again from where it is void."""
        for part in plan.parts:
            first = next((n for n, block in enumerate(part.blocks) if block in void), None)
            if part.name not in plan.loads.tasks or first is None:
                yield part
                continue
            request = self.requests.get(part.name)
            if request is None or part.name in self._gone or not request.in_flight:
                continue
            assert isinstance(request, SimRequest)
            request.in_flight -= part.count
            request.planned -= part.gives
            request.computed = first * BLOCK_TOKENS
            request.stay = Stay(request.stay.number, request.stay.loaded[:first])

    def _take(self, request: FakeRequest, tokens: int) -> bool:
        before = len(request.blocks)
        is_taken = super()._take(request, tokens)
        if is_taken and self.blocks is not None:
            for block in request.blocks[before:]:
                self.blocks.entries.remove(block)
        return is_taken

    def withdraw(self) -> LeaseIndices:
        if self.blocks is not None:
            self.blocks.entries.withdraw()
        return super().withdraw()

    def set_aside(self, pages: int) -> LeaseIndices:
        indices = super().set_aside(pages)
        if self.blocks is not None:
            for block in self._blocks(indices):
                self.blocks.entries.remove(block)
        return indices

    def _release(self, request: FakeRequest) -> None:
        blocks = request.blocks
        super()._release(request)
        if self.blocks is not None and all(each is not blocks for _, each in self._late):
            self.blocks.directory.release(blocks)

    def _free_late(self) -> None:
        over = [blocks for number, blocks in self._late if number <= self._over]
        super()._free_late()
        if self.blocks is not None:
            for blocks in over:
                self.blocks.directory.release(blocks)

    def forget_steps(self) -> None:
        super().forget_steps()
        self._in_doubt = None
        if self.blocks is not None:
            self.blocks.take_loads()
            self.blocks.entries.forget_steps()

    def _request(self, name: str) -> SimRequest:
        request = self.requests[name]
        assert isinstance(request, SimRequest)
        return request


def is_built_early(request: Any) -> bool:
    """Whether a continued request was made of an older state of its task than the last one."""
    assert isinstance(request, SimRequest)
    return request.states > 1


def digest_of(tokens: Iterable[int]) -> int:
    """Return the digest of a stream's first tokens."""
    found = 0
    for token in tokens:
        found = digest(found, token)
    return found
