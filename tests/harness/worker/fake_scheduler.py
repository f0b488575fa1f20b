"""A scheduler of one mode in memory: tasks, their blocks, and steps that it plans.

It does what a rank can see of vLLM's: running tasks first, then waiting ones; a step takes as many
tokens as its budget allows; blocks that an in-flight step writes are free after it; a task that
finds no block preempts the last one. It caches no prefixes. In a pipeline group, whose steps are
planned while others are in flight, no step has a task whose next token is in flight, unless devices
pass tokens on, and each has a share of the decodes. Tokens depend on the prompt and the position
alone (`token_at`), so a task goes on with the same ones wherever it is.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from comm_pool.layout import Mode, StepMode
from coordinator.protocol.terms import TaskId
from tests.harness.worker.fake_progress import progress_between
from worker.rank.engine import LeaseIndices, Tokens
from worker.rank.task_state import Blocks, CachedChain, RunningState, StateChange

VOCABULARY = 1000


def token_at(prompt: Sequence[int], position: int) -> int:
    """The token at a position, counted from the prompt's first one."""
    if position < len(prompt):
        return prompt[position]
    return zlib.crc32(f"{list(prompt)} {position}".encode()) % VOCABULARY


def fake_payload(name: str, prompt: Sequence[int], max_tokens: int, *, moves: bool = True) -> bytes:
    """A request as `FakeIntake` reads it; one that does not `move` cannot migrate."""
    return json.dumps([name, list(prompt), max_tokens, moves]).encode()


class FakeRequest:
    """A task: its tokens, and how many of them have KV or get it in the in-flight steps."""

    def __init__(self, name: str, prompt: list[int], max_tokens: int, moves: bool) -> None:
        self.name = TaskId(name)
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.moves = moves
        self.tokens: list[int] = []
        self.planned = 0
        """Tokens that in-flight steps will give it."""
        self.computed = self.in_flight = self.preemptions = 0
        self.last_step = 0
        """The number of the last step that computes it."""
        self.blocks: list[int] = []

    @property
    def length(self) -> int:
        """All tokens that are known once the in-flight steps are over."""
        return len(self.prompt) + len(self.tokens) + self.planned

    @property
    def is_over(self) -> bool:
        """Whether it needs no step any more."""
        return len(self.tokens) + self.planned >= self.max_tokens

    def token_ids(self) -> Tokens:
        """See `Continuation`."""
        return np.array(self.prompt + self.tokens, dtype=np.int32)

    def catch_up(self, state: RunningState) -> None:
        """See `Continuation`."""
        self.tokens += state.tokens(len(self.tokens))
        self.computed = state.computed

    def go_on(self, tokens: Sequence[int]) -> None:
        """See `Continuation`."""
        self.tokens += tokens


class FakeIntake:
    """Reads `fake_payload`s."""

    def request(self, payload: bytes) -> FakeRequest:
        """See `Intake`."""
        name, prompt, max_tokens, moves = json.loads(payload)
        if not prompt:
            raise ValueError(f"{name} has no prompt")
        return FakeRequest(name, prompt, max_tokens, moves)

    def continued_request(self, payload: bytes, state: RunningState) -> FakeRequest:
        """See `Intake`."""
        request = self.request(payload)
        request.catch_up(state)
        return request


@dataclass(frozen=True)
class Part:
    """One task's part of a step: its tokens from `start` on, which its blocks hold."""

    name: TaskId
    prompt: tuple[int, ...]
    start: int
    count: int
    blocks: tuple[int, ...]
    gives: bool
    """Whether the step gives it a token."""


@dataclass
class FakePlan:
    """A step as it is sent to followers."""

    parts: tuple[Part, ...]
    ended: frozenset[str]
    """Tasks that the runners forget."""
    number: int
    mode: StepMode = Mode.DP

    @property
    def tokens(self) -> int:
        """See `PlannedStep`."""
        return sum(each.count for each in self.parts)

    @property
    def context(self) -> int:
        """See `PlannedStep`."""
        return sum(each.start for each in self.parts)

    @property
    def is_empty(self) -> bool:
        """See `Plan`."""
        return not self.parts

    @property
    def is_void(self) -> bool:
        """See `Plan`."""
        return not self.parts and not self.ended

    @property
    def reads_prompts(self) -> bool:
        """See `Plan`."""
        return self.tokens > len(self.parts)


@dataclass(frozen=True)
class FakeOutput:
    """See `TaskOutput`."""

    request_id: TaskId
    new_token_ids: list[int]
    finished: bool


@dataclass
class FakeScheduler:
    """See `EngineScheduler`."""

    slots_per_page: int
    tokens_per_block: int
    max_tasks: int
    tokens_per_step_max: int
    requests: dict[str, FakeRequest] = field(default_factory=dict)
    preemptions: int = 0
    stages: int = 1
    """Pipeline stages of the group."""
    is_on_device: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.running: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self._ended: set[str] = set()
        self._gone: set[str] = set()
        self._granted: set[int] = set()
        self._free: list[int] = []
        self._late: list[tuple[int, list[int]]] = []
        """Blocks that are free once the step of this number is over."""
        self._bundles: list[set[int]] = []
        self.aside: set[int] = set()
        """Lease indices that no task gets."""
        self._lookahead = 0
        """Tokens for which tasks get blocks in advance."""
        self._planned = self._over = 0
        """Numbers of the last step that was planned, and of the last one that is over."""

    # ------------------------------------------------------------------ what it has

    @property
    def idle(self) -> bool:
        """See `EngineScheduler`, as all that follows."""
        return not self.requests

    @property
    def is_full(self) -> bool:
        return len(self.requests) + len(self._ended) >= self.max_tasks

    @property
    def reads_no_prompt(self) -> bool:
        return all(each.length - each.computed == 1 for each in self.running)

    @property
    def frees_after_step(self) -> bool:
        return bool(self._late)

    @property
    def blocks_free(self) -> int:
        return len(self._free)

    @property
    def blocks_total(self) -> int:
        return len(self._granted)

    def has_requests(self) -> bool:
        return bool(self.requests or self._ended)

    @property
    def passes_tokens(self) -> bool:
        return self.is_on_device()

    @property
    def may_be_void(self) -> bool:
        return False

    @property
    def has_more(self) -> bool:
        is_due = any(not (each.is_over or self._awaits_token(each)) for each in self.running)
        return bool(self._ended or self.waiting) or is_due

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def holding(self) -> list[str]:
        return [name for name in self._here() if self.requests[name].blocks]

    def not_holding(self) -> list[str]:
        return [name for name in self._here() if not self.requests[name].blocks]

    def not_movable(self) -> list[str]:
        return [name for name in self.holding() if not self.requests[name].moves]

    def outgrown(self) -> list[str]:
        blocks = len(self._granted) + len(self.aside) * self.slots_per_page
        most = blocks * self.tokens_per_block
        return [name for name in self._here() if self.requests[name].length > most]

    def _here(self) -> list[str]:
        return [name for name in self.requests if name not in self._gone]

    # ------------------------------------------------------------------ pages

    def grant(self, indices: LeaseIndices) -> None:
        self.tidy()
        granted = self._blocks(indices)
        assert 0 not in granted, "the null page cannot be granted."
        assert self._used() <= granted, "a task holds a block that is not granted."
        self.aside.clear()
        self.look_ahead(0)
        self._set(granted)

    def withdraw(self) -> LeaseIndices:
        used = {block // self.slots_per_page for block in self._used()}
        self._bundles = [each for each in self._bundles if each & used]
        return np.array(sorted(used.union(*self._bundles)), dtype=np.int64)

    def set_aside(self, pages: int) -> LeaseIndices:
        free = {*self._free}
        bundled = set[int]().union(*self._bundles)
        for index in sorted({block // self.slots_per_page for block in free} - bundled):
            if len(self.aside) < pages and (blocks := self._blocks([index])) <= free:
                self.aside.add(index)
                self._set(self._granted - blocks)
        return np.array(sorted(self.aside), dtype=np.int64)

    def give_back(self) -> None:
        blocks = self._blocks(self.aside)
        self.aside.clear()
        self._set(self._granted | blocks)

    def look_ahead(self, tokens: int) -> None:
        more = len(self.requests) * -(-tokens // self.tokens_per_block)
        self._lookahead = tokens if 2 * more <= len(self._free) else 0

    def holders_of(self, indices: LeaseIndices) -> list[str]:
        blocks = self._blocks(indices)
        return [name for name in self.holding() if blocks & {*self.requests[name].blocks}]

    def _blocks(self, indices: Iterable[int]) -> set[int]:
        size = self.slots_per_page
        return {int(index) * size + place for index in indices for place in range(size)}

    def _used(self) -> set[int]:
        late = {block for _, blocks in self._late for block in blocks}
        return late.union(*(self.requests[name].blocks for name in self._here()))

    def _set(self, granted: set[int]) -> None:
        self._free = [each for each in self._free if each in granted]
        self._free += sorted(granted - self._granted - self._used())
        self._granted = granted

    def _take(self, request: FakeRequest, tokens: int) -> bool:
        """Give a task the blocks for this number of tokens, if they are free."""
        missing = -(-tokens // self.tokens_per_block) - len(request.blocks)
        if missing > len(self._free):
            return False
        request.blocks += [self._free.pop(0) for _ in range(missing)]
        return True

    def _release(self, request: FakeRequest) -> None:
        blocks, request.blocks = request.blocks, []
        if request.in_flight and self._over < self._planned:
            self._late.append((self._planned, blocks))
        else:
            self._free += blocks

    # ------------------------------------------------------------------ steps

    def plan_step(self) -> FakePlan:
        """Schedule one step."""
        room, parts = self.tokens_per_step_max, list[Part]()
        waits = self._waiting_decodes()
        for request in list(self.running):
            if request.is_over or self._awaits_token(request) or request.name in waits:
                continue
            if not room or request not in self.running:
                continue
            if (part := self._part(request, room, preempts=True)) is not None:
                parts.append(part)
                room -= part.count
        while self.waiting and room and len(self.running) < self.max_tasks:
            if (part := self._part(self.waiting[0], room, preempts=not self.running)) is None:
                break
            self.running.append(self.waiting.pop(0))
            parts.append(part)
            room -= part.count
        ended, self._ended = frozenset(self._ended), set()
        # Nobody computes or finishes a void step of a pipeline group.
        self._planned += bool(parts or ended or self.stages == 1)
        return FakePlan(tuple(parts), ended, self._planned)

    def _awaits_token(self, request: FakeRequest) -> bool:
        """Whether the task is in no further step before one that is in flight is over."""
        return self.stages > 1 and request.planned > self.passes_tokens

    def _waiting_decodes(self) -> set[str]:
        """Return decodes that are left to the next steps, as `micro_batches` does."""
        if self.stages == 1:
            return set()
        decoding = [each for each in self.running if each.length - each.computed == 1]
        ready = [e for e in decoding if not (e.is_over or self._awaits_token(e))]
        ready.sort(key=lambda each: each.last_step)
        return {each.name for each in ready[-(-len(decoding) // self.stages) :]}

    def _part(self, request: FakeRequest, room: int, *, preempts: bool) -> Part | None:
        start = request.computed
        count = min(request.length - start, room)
        while not self._take(request, start + count + self._lookahead):
            if not preempts or not self._preempt(request):
                return None
        request.computed += count
        request.in_flight += count
        request.last_step = self._planned + 1
        gives = request.computed == request.length
        request.planned += gives
        prompt, blocks = tuple(request.prompt), tuple(request.blocks)
        return Part(request.name, prompt, start, count, blocks, gives)

    def _preempt(self, wants: FakeRequest) -> bool:
        """Take the blocks of the last task that no step computes."""
        others = [*self.running, *(each for each in self.waiting if each.blocks)]
        for last in reversed(others):
            if last is not wants and not last.in_flight:
                self._release(last)
                last.computed = 0
                last.preemptions += 1
                self.preemptions += 1
                if last in self.running:
                    self.running.remove(last)
                    self.waiting.insert(0, last)
                return True
        return False

    def finish_step(self, plan: FakePlan, tokens: Mapping[str, int]) -> list[FakeOutput]:
        """Take in what a step gave."""
        self._over = plan.number
        outputs: list[FakeOutput] = []
        for part in plan.parts:
            request = self.requests.get(part.name)
            if request is None or part.name in self._gone or not request.in_flight:
                continue
            request.in_flight -= part.count
            if part.gives:
                request.planned -= 1
                request.tokens.append(tokens[part.name])
                is_last = len(request.tokens) >= request.max_tokens
                outputs.append(FakeOutput(request.name, request.tokens[-1:], is_last))
                if is_last:
                    self._remove(part.name)
        self._free_late()
        return outputs

    def forget_steps(self) -> None:
        """Free what steps that never end would write."""
        self._over = self._planned
        self._free_late()

    def _free_late(self) -> None:
        over = [each for each in self._late if each[0] <= self._over]
        self._late = [each for each in self._late if each[0] > self._over]
        for _, blocks in over:
            self._free += [block for block in blocks if block in self._granted]

    # ------------------------------------------------------------------ tasks

    def add_task(
        self, request: FakeRequest, generated: list[int], *, is_promoted: bool = False
    ) -> None:
        request.tokens = list(generated)
        self.requests[request.name] = request
        self.waiting.append(request)

    def take_back(self, request_ids: Iterable[str]) -> dict[str, list[int]]:
        return {n: self._remove(n).tokens for n in request_ids if n in self.requests}

    def _remove(self, name: str) -> FakeRequest:
        request = self.requests.pop(name)
        self._release(request)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self._gone.discard(name)
        self._ended.add(name)
        return request

    def leave_to_others(self, request_ids: Iterable[str]) -> None:
        self._gone.update(name for name in request_ids if name in self.requests)

    def tidy(self, most: int | None = None) -> bool:
        # Not in the order of the set, which differs from process to process: blocks become free.
        for name in [name for name in self.requests if name in self._gone][:most]:
            self._remove(name)
        return not self._gone

    # ------------------------------------------------------------------ migration

    def movable(self, _cached_blocks_max: int) -> tuple[list[RunningState], list[CachedChain]]:
        held = (self.requests[name] for name in self.holding())
        return [self._state(each) for each in held if each.moves and each.computed], []

    def _state(self, request: FakeRequest) -> RunningState:
        return RunningState(
            request.name,
            msgspec.msgpack.encode(request.tokens),
            len(request.tokens),
            request.computed,
            request.computed - request.in_flight,
            np.array(request.blocks, dtype=np.int64),
            [],
            None,
            request.preemptions,
        )

    def written_blocks(self) -> Blocks:
        written = [block for _, blocks in self._late for block in blocks]
        for request in (self.requests[name] for name in self.holding()):
            if request.in_flight:
                settled = request.computed - request.in_flight
                written += request.blocks[settled // self.tokens_per_block :]
        return np.array(written, dtype=np.int64)

    def progress_since(
        self, states: Sequence[RunningState], chains: Iterable[CachedChain]
    ) -> list[StateChange | None] | None:
        assert not [*chains], "it caches nothing that could have been listed."
        return progress_between(states, self.movable(0)[0])

    def tokens_since(self, counts: Mapping[str, int]) -> dict[str, list[int]]:
        known = ((name, self.requests.get(name)) for name in counts)
        return {name: each.tokens[counts[name] :] for name, each in known if each is not None}

    def adopt(
        self,
        tasks: Iterable[tuple[Any, Blocks]],
        chains: Sequence[CachedChain],
        granted: LeaseIndices,
        indices: LeaseIndices,
        known: Mapping[str, Tokens] | None = None,
    ) -> None:
        assert not chains, "it caches nothing that it could be given."
        assert known is None or all(isinstance(each, np.ndarray) for each in known.values())
        self.tidy()
        self._set(self._granted | self._blocks(granted))
        if len(indices):
            self._bundles.append(set(indices.tolist()))
        for request, blocks in tasks:
            request.blocks = blocks.tolist()
            assert {*request.blocks} <= {*self._free}, "the blocks of a task are not free."
            self._free = [each for each in self._free if each not in request.blocks]
            self.requests[request.name] = request
            self.waiting.append(request)
