"""vLLM's logprobs over the whole vocabulary as arrays that can be compared."""

from typing import Any


def rows_of(lists: Any) -> list[Any]:
    """vLLM's LogprobsLists over the whole vocabulary -> one (vocab,) array per token."""
    import numpy as np

    rows = []
    for ids, values in zip(lists.logprob_token_ids, lists.logprobs, strict=True):
        row = np.full(len(ids) - 1, np.nan, dtype=np.float32)
        row[np.asarray(ids)] = np.asarray(values, dtype=np.float32)
        rows.append(row)
    return rows
