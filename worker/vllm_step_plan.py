"""vLLM adapter: one scheduled step, as a leader plans it and sends it to its followers."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput

from comm_pool.layout import Mode, StepMode


@dataclass(slots=True)
class StepPlan:
    """One scheduled step, as sent to followers: logical block ids, tokens that new tasks have."""

    output: SchedulerOutput
    grammar: GrammarOutput | None
    resuming: dict[str, list[int]] = field(default_factory=dict)
    mode: StepMode = Mode.DP
    """How the group computes this step; its leader decides, and every member obeys."""

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
        """Followers read token ids as arrays: new tasks may bring a hundred thousand at once."""
        new = self.output.scheduled_new_reqs
        tokens = [
            [None if ids is None else np.array(ids, dtype=np.int32) for ids in _token_lists(each)]
            for each in new
        ]
        bare = [replace(each, prompt_token_ids=None, prefill_token_ids=None) for each in new]
        output = replace(self.output, scheduled_new_reqs=bare)
        return _unpacked, (output, tokens, self.grammar, self.resuming, self.mode)


def _token_lists(request: NewRequestData) -> tuple[list[int] | None, list[int] | None]:
    return request.prompt_token_ids, request.prefill_token_ids


def _unpacked(
    output: SchedulerOutput,
    tokens: list[list[npt.NDArray[np.int32] | None]],
    grammar: GrammarOutput | None,
    resuming: dict[str, list[int]],
    mode: StepMode,
) -> StepPlan:
    """What `StepPlan.__reduce__` was made from."""
    for request, arrays in zip(output.scheduled_new_reqs, tokens, strict=True):
        prompt, prefill = (None if each is None else each.tolist() for each in arrays)
        request.prompt_token_ids, request.prefill_token_ids = prompt, prefill
    return StepPlan(output, grammar, resuming, mode)
