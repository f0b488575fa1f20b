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
TokenIds = list[int] | Tokens
"""As vLLM has them, or as followers get them."""


_Sizes = tuple[int, int, int]
"""Of the prompt, of what was generated and of prefill_token_ids; -1 is None."""

_WHOLE = -2
"""As the last of these: they are the prompt and what was generated."""


@dataclass(slots=True)
class StepPlan:
    """One scheduled step, as sent to followers: logical block ids, tokens that new tasks have."""

    output: SchedulerOutput
    grammar: GrammarOutput | None
    resuming: Mapping[str, TokenIds] = field(default_factory=dict)
    mode: StepMode = Mode.DP
    """How the group computes this step; its leader decides, and every member obeys."""
    known: Mapping[str, Tokens] = field(default_factory=dict)
    """All token ids of new tasks that a move has brought: to make an array takes as long as to send
    it."""

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

        Objects cost more than bytes here: 200 tasks that a move has brought take 5 ms less so, at
        either end.
        """
        pieces: list[Tokens] = []
        sizes = [self._pack(each, pieces) for each in self.output.scheduled_new_reqs]
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
        output = replace(
            self.output, scheduled_new_reqs=list(map(_bare, self.output.scheduled_new_reqs))
        )
        return _unpacked, (output, tokens, sizes, self.grammar, self.mode)

    def _pack(self, request: NewRequestData, pieces: list[Tokens]) -> _Sizes:
        """Add a task's token ids to the pieces: its prompt, what was generated, and the rest."""
        asked, given = request.prompt_token_ids, request.prefill_token_ids
        generated = self.resuming.get(request.req_id)
        sizes = [-1 if ids is None else len(ids) for ids in (asked, generated, given)]
        whole, known = sum(map(len, (asked or (), generated or ()))), self.known.get(request.req_id)
        if asked is not None and given is not None and len(given) == whole:
            # vLLM's tokens to read are the prompt, and what was generated.
            given, sizes[2] = None, _WHOLE
        if known is not None and known.size == whole:
            asked, generated = None, known
        pieces += [
            np.asarray(ids, np.int32) for ids in (asked, generated, given) if ids is not None
        ]
        return sizes[0], sizes[1], sizes[2]


def give_lists(step: SchedulerOutput) -> None:
    """Let new tasks have their token ids as vLLM wants them."""
    for each in step.scheduled_new_reqs:
        if each.prompt_token_ids is not None:
            each.prompt_token_ids = listed(each.prompt_token_ids)
        if each.prefill_token_ids is not None:
            each.prefill_token_ids = listed(each.prefill_token_ids)


def give_arrays(step: SchedulerOutput, known: Mapping[str, Tokens]) -> None:
    """Let new tasks that this rank has planned have their tokens as followers get them."""
    for each in step.scheduled_new_reqs:
        whole = known.get(each.req_id)
        given = each.prefill_token_ids
        if whole is not None and given is not None and len(given) == whole.size:
            each.prefill_token_ids = whole


def listed(ids: TokenIds) -> list[int]:
    """The same as a list."""
    return ids.tolist() if isinstance(ids, np.ndarray) else ids


def _bare(request: NewRequestData) -> NewRequestData:
    bare = copy(request)
    bare.prompt_token_ids = bare.prefill_token_ids = None
    return bare


def _unpacked(
    output: SchedulerOutput,
    tokens: Tokens,
    sizes: Sequence[_Sizes],
    grammar: GrammarOutput | None,
    mode: StepMode,
) -> StepPlan:
    """What `StepPlan.__reduce__` was made from."""
    resuming: dict[str, TokenIds] = {}
    at = 0

    def take(size: int) -> Tokens | None:
        nonlocal at
        start, at = at, at + max(size, 0)
        return tokens[start:at] if size >= 0 else None

    for request, (asked, generated, given) in zip(output.scheduled_new_reqs, sizes, strict=True):
        start = at
        request.prompt_token_ids = take(asked)
        if (made := take(generated)) is not None:
            resuming[request.req_id] = made
        request.prefill_token_ids = tokens[start:at] if given == _WHOLE else take(given)
    return StepPlan(output, grammar, resuming, mode)
