"""vLLM adapter: one scheduled step, as a leader plans it and sends it to its followers."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput

from comm_pool.layout import Mode, StepMode

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True)
class StepPlan:
    """One scheduled step, as sent to followers: logical block ids, tokens that new tasks have."""

    output: SchedulerOutput
    grammar: GrammarOutput | None
    resuming: dict[str, list[int]] = field(default_factory=dict)
    mode: StepMode = Mode.DP
    """How the group computes this step; its leader decides, and every member obeys."""
    prompts: Mapping[str, Tokens] = field(default_factory=dict)
    """Prompts of new tasks that are known as arrays; to make one takes as long as to send it."""

    @property
    def tokens(self) -> int:
        """Tokens that are computed in it."""
        return int(self.output.total_num_scheduled_tokens)

    @property
    def context(self) -> int:
        """Tokens before those, whose KV is read."""
        new = sum(each.num_computed_tokens for each in self.output.scheduled_new_reqs)
        return int(new + sum(self.output.scheduled_cached_reqs.num_computed_tokens))

    @property
    def is_empty(self) -> bool:
        """Nothing is computed in it."""
        return not self.tokens

    @property
    def reads_prompts(self) -> bool:
        """Some task computes more than its last token, so its first one may come out."""
        return self.tokens > len(self.output.num_scheduled_tokens)

    def __reduce__(self) -> Any:
        """Followers read token ids as one array: new tasks may bring a hundred thousand at once.

        Objects cost more than bytes here: 200 tasks that a move has brought take 2 ms less so.
        """
        pieces: list[Tokens] = []
        sizes = [self._pack(each, pieces) for each in self.output.scheduled_new_reqs]
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
        output = replace(
            self.output, scheduled_new_reqs=list(map(_bare, self.output.scheduled_new_reqs))
        )
        return _unpacked, (output, tokens, sizes, self.grammar, self.mode)

    def _pack(self, request: NewRequestData, pieces: list[Tokens]) -> tuple[int, int, int]:
        """Add a task's token ids to the pieces; returns the sizes of its three lists."""
        generated = self.resuming.get(request.req_id)
        asked, given = request.prompt_token_ids, request.prefill_token_ids
        prompt = None if asked is None else self.prompts.get(request.req_id, asked)
        is_both = given is not None and asked is not None and generated is not None
        lists = (prompt, _NOTHING if is_both else given, generated)
        pieces += [np.asarray(ids, dtype=np.int32) for ids in lists if ids is not None]
        asked_size, given_size, generated_size = (-1 if ids is None else len(ids) for ids in lists)
        return asked_size, _BOTH if is_both else given_size, generated_size


_BOTH = -2
"""As a size of prefill_token_ids: they are the prompt and what was generated."""

_NOTHING: Tokens = np.zeros(0, dtype=np.int32)


def _bare(request: NewRequestData) -> NewRequestData:
    bare = copy(request)
    bare.prompt_token_ids = bare.prefill_token_ids = None
    return bare


def _unpacked(
    output: SchedulerOutput,
    tokens: Tokens,
    sizes: Sequence[tuple[int, int, int]],
    grammar: GrammarOutput | None,
    mode: StepMode,
) -> StepPlan:
    """What `StepPlan.__reduce__` was made from."""
    all_tokens: list[int] = tokens.tolist()
    resuming: dict[str, list[int]] = {}
    at = 0

    def take(size: int) -> list[int] | None:
        nonlocal at
        start, at = at, at + max(size, 0)
        return all_tokens[start:at] if size >= 0 else None

    for request, (asked, given, generated) in zip(output.scheduled_new_reqs, sizes, strict=True):
        request.prompt_token_ids, prefill = take(asked), take(given)
        if (made := take(generated)) is not None:
            resuming[request.req_id] = made
            prefill = (request.prompt_token_ids or []) + made if given == _BOTH else prefill
        request.prefill_token_ids = prefill
    return StepPlan(output, grammar, resuming, mode)
