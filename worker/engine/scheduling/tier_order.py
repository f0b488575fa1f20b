"""vLLM adapter: where blocks run short, urgent tasks keep theirs and get the next ones.

vLLM preempts the last of its running tasks, and takes the first of the waiting ones in; its order
is that of arrival. The gateway writes the tier of a task into its priority, lower first.
"""

from operator import attrgetter
from typing import Any

_priority = attrgetter("priority")


def put_urgent_first(scheduler: Any) -> None:
    """Order a scheduler's tasks by tier if its next step may need more blocks than are free.

    Tasks of one tier stay in the order that they have.
    """
    running, waiting = scheduler.running, scheduler.waiting
    prompt_blocks = scheduler.max_num_scheduled_tokens // scheduler.block_size
    if scheduler.blocks_free >= len(running) + prompt_blocks:
        return
    running.sort(key=_priority)
    if len(waiting) > 1:
        ordered = sorted(waiting, key=_priority)
        waiting.clear()
        waiting.extend(ordered)
