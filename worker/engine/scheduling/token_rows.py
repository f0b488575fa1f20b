"""vLLM adapter: token ids of many new tasks reach model runner V2 as arrays, one row each.

vLLM collects the ids of new tasks in one list and makes an array of it, which the device copies to
their rows: 5 ms for 200 tasks that a move has brought. Where rows lie in the host's memory, which
the device reads (vLLM's choice for so large a tensor), an array can be written to its row at once.
That is in no order with what the device does, so nobody may do it while a step is under way.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from worker.engine.scheduling.step_plan import Tokens


def take_arrays(tokens: Any) -> bool:
    """Let a `StagedWriteTensor` of rows take arrays beside lists; False where it cannot."""
    buffer = getattr(tokens, "_uva_buf", None)
    # On platforms without pinned memory the host's side is copied to the device's now and then.
    if buffer is None or buffer.uva().data_ptr() != tokens.gpu.data_ptr():
        return False
    rows, stage_write = buffer.np, tokens.stage_write

    def write(index: int, start: int, ids: Sequence[int] | Tokens) -> None:
        if isinstance(ids, np.ndarray):
            rows[index, start : start + ids.size] = ids
        else:
            stage_write(index, start, ids)

    tokens.stage_write = write
    return True
