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
"""Token ids as vLLM has them, or as followers get them."""


_Sizes = tuple[int, int, int]
"""Sizes of the prompt, the generated tokens and prefill_token_ids; -1 is None."""

_WHOLE = -2
"""As the last size: prefill_token_ids are the prompt and the generated tokens."""


@dataclass(slots=True)
class StepPlan:
    """One scheduled step as sent to followers: logical block ids, tokens of new tasks."""

    output: SchedulerOutput
    grammar: GrammarOutput | None
    resuming: Mapping[str, TokenIds] = field(default_factory=dict)
    mode: StepMode = Mode.DP
    """How the group computes this step; its leader decides, and every member obeys."""
    known: Mapping[str, Tokens] = field(default_factory=dict)
    """All token ids of migrated tasks that are new in this step.

    Making an array takes as long as sending it, so it is kept.
    """

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.output.total_num_scheduled_tokens)

    @property
    def context(self) -> int:
        """Tokens before those, whose KV the step reads."""
        new = sum(each.num_computed_tokens for each in self.output.scheduled_new_reqs)
        return int(new + sum(self.output.scheduled_cached_reqs.num_computed_tokens))

    @property
    def is_empty(self) -> bool:
        """Whether the step computes nothing."""
        return not self.tokens

    @property
    def is_void(self) -> bool:
        """Whether it computes nothing, copies nothing and lists no task that runners forget."""
        does_nothing = self.is_empty and self.output.kv_connector_metadata is None
        return does_nothing and not (self.output.finished_req_ids or self.output.preempted_req_ids)

    @property
    def reads_prompts(self) -> bool:
        """Whether some task computes more than its last token, so its first one may come out."""
        return self.tokens > len(self.output.num_scheduled_tokens)

    def __reduce__(self) -> Any:
        """Pack token ids into one array: new tasks may bring a hundred thousand at once.

        Objects cost more than bytes: this saves 5 ms at either end for 200 migrated tasks.
        """
        pieces: list[Tokens] = []
        sizes = [self._pack(each, pieces) for each in self.output.scheduled_new_reqs]
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
        output = replace(
            self.output, scheduled_new_reqs=list(map(_bare, self.output.scheduled_new_reqs))
        )
        return _unpacked, (output, tokens, sizes, self.grammar, self.mode)

    def _pack(self, request: NewRequestData, pieces: list[Tokens]) -> _Sizes:
        """Add a task's token ids to the pieces: prompt, generated tokens, and prefill_token_ids."""
        asked, given = request.prompt_token_ids, request.prefill_token_ids
        generated = self.resuming.get(request.req_id)
        sizes = [-1 if ids is None else len(ids) for ids in (asked, generated, given)]
        whole, known = sum(map(len, (asked or (), generated or ()))), self.known.get(request.req_id)
        if asked is not None and given is not None and len(given) == whole:
            # prefill_token_ids are just the prompt and the generated tokens.
            given, sizes[2] = None, _WHOLE
        if known is not None and known.size == whole:
            asked, generated = None, known
        pieces += [
            np.asarray(ids, np.int32) for ids in (asked, generated, given) if ids is not None
        ]
        return sizes[0], sizes[1], sizes[2]


def with_own_mask(grammar: GrammarOutput) -> GrammarOutput:
    """Return the same with a mask of its own: vLLM fills one buffer for every step."""
    return replace(grammar, grammar_bitmask=grammar.grammar_bitmask.copy())


def give_lists(step: SchedulerOutput) -> None:
    """Convert the token ids of new tasks to lists, which vLLM expects."""
    for each in step.scheduled_new_reqs:
        if each.prompt_token_ids is not None:
            each.prompt_token_ids = listed(each.prompt_token_ids)
        if each.prefill_token_ids is not None:
            each.prefill_token_ids = listed(each.prefill_token_ids)


def give_arrays(step: SchedulerOutput, known: Mapping[str, Tokens]) -> None:
    """Give new tasks that this rank planned their tokens as arrays, as followers get them."""
    for each in step.scheduled_new_reqs:
        whole = known.get(each.req_id)
        given = each.prefill_token_ids
        if whole is not None and given is not None and len(given) == whole.size:
            each.prefill_token_ids = whole


def listed(ids: TokenIds) -> list[int]:
    """Return the ids as a list."""
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
    """Rebuild the plan that `StepPlan.__reduce__` packed."""
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
