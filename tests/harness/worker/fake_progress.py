"""What tasks have got between two looks at a scheduler in memory."""

from collections.abc import Iterable

import numpy as np

from worker.rank.task_state import RunningState, StateChange


def progress_between(
    states: Iterable[RunningState], now: Iterable[RunningState]
) -> list[StateChange | None] | None:
    """See `EngineScheduler.progress_since`."""
    left = {each.task: each for each in now}
    found: list[StateChange | None] = []
    for state in states:
        each = left.pop(state.task, None)
        if each is None:
            found.append(None)
            continue
        if (each.blocks.size, each.preemptions) != (state.blocks.size, state.preemptions):
            return None
        assert np.array_equal(each.blocks, state.blocks), "blocks are only ever added."
        tokens, hashes = each.tokens(state.count), each.hashes[len(state.hashes) :]
        found.append(StateChange(tokens, hashes, each.computed, each.settled, each.prefill_stats))
    return None if left else found
