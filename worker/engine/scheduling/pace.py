"""vLLM adapter: how large a step with prompts is where each step takes its loans' time."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from worker.engine.scheduling.micro_batches import decodes

PROMPT_SHARE = 0.5
"""Part of the pace that prompts get at least, however many tasks decode."""


def schedule_paced(scheduler: Any, pace_tokens: int) -> SchedulerOutput:
    """Let vLLM's scheduler plan a step of about `pace_tokens`, if tasks decode."""
    running, tokens_max = scheduler.running, scheduler.max_num_scheduled_tokens
    count = sum(map(decodes, running))
    if count:
        # Decodes go first: one long prompt before them would take the whole step.
        running.sort(key=decodes, reverse=True)
        share = max(1, int(PROMPT_SHARE * pace_tokens))
        scheduler.max_num_scheduled_tokens = min(tokens_max, max(pace_tokens, count + share))
    try:
        output: SchedulerOutput = scheduler.schedule()
    finally:
        scheduler.max_num_scheduled_tokens = tokens_max
    return output
