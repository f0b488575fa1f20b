"""vLLM adapter: one scheduled step, as a leader plans it and sends it to its followers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from comm_pool.layout import Mode, StepMode
from worker.engine.scheduling.new_tasks import NewTasks, TokenIds, Tokens


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
        """Pack new tasks into columns: after a switch all are new (`new_tasks`)."""
        tasks = NewTasks.of(self.output.scheduled_new_reqs, self.resuming, self.known)
        output = replace(self.output, scheduled_new_reqs=[])
        return _unpacked, (output, tasks, self.grammar, self.mode)


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


def _unpacked(
    output: SchedulerOutput, tasks: NewTasks, grammar: GrammarOutput | None, mode: StepMode
) -> StepPlan:
    """Rebuild the plan that `StepPlan.__reduce__` packed."""
    output.scheduled_new_reqs, resuming = tasks.unpacked()
    return StepPlan(output, grammar, resuming, mode)
