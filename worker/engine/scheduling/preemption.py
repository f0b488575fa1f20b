"""vLLM adapter: whose KV goes first where blocks run short: that of batch tasks.

vLLM preempts the last of its running tasks, and takes the first of the waiting ones in; its order
is that of arrival. So batch tasks go to the end. Interactive and standard ones stay in the order of
arrival among each other: a long prompt of one would otherwise take whole steps from all others.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

USUAL_PRIORITY = 0
"""vLLM's priority of a request, lower first; gateways give batch tasks a higher one."""


def yields(request: Request) -> bool:
    """Return whether a task's KV goes before others': of batch, unless placed for its age."""
    return bool(request.priority > USUAL_PRIORITY)


def protect(request: Request) -> None:
    """Let a batch task that was placed for its age keep its KV as the others do."""
    request.priority = min(request.priority, USUAL_PRIORITY)


class CatchingUp:
    """Tasks that compute blocks again of which others count on having them computed before.

    vLLM lets the first running task that has a void block compute it again, and the later ones go
    on. So the order of tasks must stay until the first ones have what they had.
    """

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def note(self, requests: Iterable[Request]) -> None:
        """Note tasks with void blocks, as they are after the step that read them."""
        self._tokens |= {each.request_id: each.num_tokens for each in requests}

    def any_of(self, requests: dict[str, Request]) -> bool:
        """Return whether one of them still computes what it had."""
        for name, tokens in list(self._tokens.items()):
            request = requests.get(name)
            if request is None or request.num_computed_tokens >= tokens:
                del self._tokens[name]
        return bool(self._tokens)


def put_batch_last(scheduler: Any, catching_up: CatchingUp) -> None:
    """Order a scheduler's tasks so that a shortage of blocks falls on batch tasks.

    Waiting ones always, as vLLM's next one waits for all blocks of its prompt, and the others for
    it; running ones if the next step may need more blocks than are free.
    """
    if scheduler.policy is not SchedulingPolicy.FCFS:
        return  # vLLM itself orders by priority then.
    running, waiting = scheduler.running, scheduler.waiting
    if len(waiting) > 1 and yields(waiting[0]):
        ordered = sorted(waiting, key=yields)
        waiting.clear()
        waiting.extend(ordered)
    prompt_blocks = scheduler.max_num_scheduled_tokens // scheduler.block_size
    is_short = scheduler.blocks_free < len(running) + prompt_blocks
    if is_short and not catching_up.any_of(scheduler.requests):
        running.sort(key=yields)


def make_room(scheduler: Any) -> None:
    """Preempt a migrated waiting task if all of them wait for a block.

    vLLM preempts running tasks only; these arrived with all blocks in use, and none runs yet.
    """
    holding = scheduler.kv_holding_waiting
    waiting = [each for each in holding if each not in scheduler.deferred_waiting]
    if scheduler.running or not waiting:
        return
    last = max(reversed(waiting), key=yields)
    holding.remove_request(last)
    scheduler.kv_cache_manager.free(last)
    last.num_computed_tokens = 0
    last.num_preemptions += 1
    scheduler.waiting.prepend_request(last)
