"""vLLM adapter: writes token ids of many new tasks into model runner V2 as arrays, one row each.

vLLM collects the ids of new tasks in one list and converts that to an array, which the device
copies to rows: 5 ms for 200 migrated tasks. If the rows lie in host memory that the device reads
(vLLM's choice for so large a tensor), an array can be written to its row directly. Such a write is
not ordered with device work, so it must not happen while a step is in flight.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.request import Request

from worker.engine.scheduling.new_tasks import Tokens


def take_arrays(tokens: Any) -> bool:
    """Let a `StagedWriteTensor` of rows accept arrays besides lists; return False if it cannot."""
    buffer = getattr(tokens, "_uva_buf", None)
    # Without pinned memory the host's copy reaches the device only at intervals.
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


def whole_tokens(request: Request, known: Tokens) -> Tokens:
    """Return all tokens of a request, of which the first are `known`."""
    ids, size = request._all_token_ids, known.size
    if len(ids) == size:
        return known
    whole = np.empty(len(ids), dtype=np.int32)
    whole[:size] = known
    whole[size:] = ids[size:]
    return whole
