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


T = TypeVar("T", bound=Decoding)


def decodes(request: Decoding) -> bool:
    """Return whether the next step computes no more than the last token of a running task."""
    return request.num_tokens - request.num_computed_tokens <= 1


def hidden_decodes(running: Sequence[T], stages: int, turn: int) -> set[T]:
    """Return the decodes that wait for a step after this one, which is the `turn`-th.

    Each step gets a share of all n decoding tasks, in-flight ones counted (Seesaw, section 3.1:
    micro-batches). The shares of as many steps as there are stages add up to n and differ by at
    most one, so sizes even out whatever they are at first. Prompts are never hidden.
    """
    decoding = list(filter(decodes, running))
    ready = [each for each in decoding if each.num_tokens > each.num_computed_tokens]
    share, rest = divmod(len(decoding), stages)
    return set(ready[max(1, share + (turn % stages < rest)) :])


def schedule_share(scheduler: Any, stages: int) -> SchedulerOutput:
    """Let vLLM's scheduler plan one of the steps that the stages of its group compute at once."""
    running = scheduler.running
    hidden = hidden_decodes(running, stages, scheduler.sched_step_seq)
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
    # Only asynchronous runners read it: all tokens of each task that the step before lacks.
    output.scheduled_cached_reqs.all_token_ids = {}
    return output
