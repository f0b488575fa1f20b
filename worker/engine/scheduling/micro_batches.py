"""vLLM adapter: divides the decodes of a pipeline group among the steps that its stages compute.

vLLM 0.32 lets the first step after a burst or a migration have all decodes. These stay together
from then on, and all stages but one idle.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from vllm.v1.core.sched.output import SchedulerOutput


class Decoding(Protocol):
    """What a running task tells of its progress; vLLM's requests do."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""

    @property
    def num_computed_tokens(self) -> int:
        """Those that earlier steps compute, in-flight ones included."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of the answer."""

    @property
    def use_structured_output(self) -> bool:
        """Whether each token depends on those before it by a grammar, which the host follows."""

    @property
    def next_decode_eligible_step(self) -> int:
        """The step after the last one that decoded for the task; `schedule_share` notes it."""


T = TypeVar("T", bound=Decoding)

AHEAD_MAX = 2
"""Steps in flight that may compute one task where devices pass on the tokens themselves."""


def decodes(request: Decoding) -> bool:
    """Return whether the next step computes no more than the last token of a running task."""
    return request.num_tokens - request.num_computed_tokens <= 1


def _inflight(request: Decoding) -> int:
    """Return how many steps in flight decode for a task."""
    return max(0, request.num_computed_tokens - request.num_tokens + 1)


def is_due(request: Decoding, ahead_max: int) -> bool:
    """Return whether a step can compute a task, which at most `ahead_max` in flight may have."""
    inflight = _inflight(request)
    if not inflight:
        return True
    is_last = request.num_tokens + inflight >= request.num_prompt_tokens + request.max_tokens
    return inflight < ahead_max and not (is_last or request.use_structured_output)


def hidden_decodes(running: Sequence[T], stages: int, turn: int, ahead_max: int = 1) -> set[T]:
    """Return the decodes that wait for a step after this one, which is the `turn`-th.

    Each step gets a share of all n decoding tasks, in-flight ones counted (Seesaw, section 3.1:
    micro-batches). The shares of as many steps as there are stages add up to n and differ by at
    most one, so sizes even out whatever they are at first. Prompts are never hidden.
    """
    decoding = list(filter(decodes, running))
    ready = [each for each in decoding if is_due(each, ahead_max)]
    if ahead_max > 1:
        ready.sort(key=lambda each: each.next_decode_eligible_step)
        newest = max((each.next_decode_eligible_step for each in decoding), default=0)
        older = [e for e in ready if not _inflight(e) or e.next_decode_eligible_step < newest]
        # With one task of the newest step, the first stage waits for its token with the whole step.
        ready = older or ready
    share, rest = divmod(len(decoding), stages)
    chosen = max(1, share + (turn % stages < rest))
    # vLLM itself leaves out what is in flight, unless it plans ahead.
    return set(ready[chosen:]) if ahead_max == 1 else set(decoding).difference(ready[:chosen])


def schedule_share(scheduler: Any, stages: int, ahead_max: int) -> SchedulerOutput:
    """Let vLLM's scheduler plan one of the steps that the stages of its group compute at once."""
    running = scheduler.running
    hidden = hidden_decodes(running, stages, scheduler.sched_step_seq, ahead_max)
    scheduler.running = [each for each in running if each not in hidden]
    # vLLM admits tasks up to the second bound, and asserts the first one, which runners have.
    scheduler.max_num_running_reqs -= len(hidden)
    scheduler.max_num_active_reqs -= len(hidden)
    try:
        output: SchedulerOutput = scheduler.schedule()
    finally:
        scheduler.max_num_running_reqs += len(hidden)
        scheduler.max_num_active_reqs += len(hidden)
        now, before = set(scheduler.running), set(running)
        scheduler.running = [
            *(each for each in running if each in now or each in hidden),
            *(each for each in scheduler.running if each not in before),
        ]
    cached = output.scheduled_cached_reqs
    # Only asynchronous runners of vLLM's first kind read it: tokens that the step before lacks.
    cached.all_token_ids = {}
    if ahead_max > 1:
        _list_tokens(scheduler, output)
    return output


def _list_tokens(scheduler: Any, output: SchedulerOutput) -> None:
    """List the last token of each decoding task, if the host has it; note whose turn it was.

    vLLM lists them only if it plans nothing ahead.
    """
    cached = output.scheduled_cached_reqs
    counts, listed = output.num_scheduled_tokens, []
    for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        request = scheduler.requests[name]
        is_decode = counts[name] == 1
        listed.append(list(request.all_token_ids[computed : computed + 1]) if is_decode else [])
    cached.new_token_ids = listed
    for name in counts:
        scheduler.requests[name].next_decode_eligible_step = scheduler.current_step + 1
