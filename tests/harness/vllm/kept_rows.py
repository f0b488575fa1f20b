"""The form in which references keep rows of logits: a sixth of the values, and every change seen.

Of a row of 4096 logits these are kept:

- every 32nd, and the 16 largest with their columns: a change of these is seen directly;
- sums over 16 neighbours, and over 16 that are 16 apart, both with signs that alternate. The row is
  a pile of squares of 16 by 16, the last filled up with zeros, of which these are the sums of
  lines and of columns. A change of one logit, or of any two or three, cannot cancel out in all of
  them: it takes four, at the corners of a rectangle. A change of all logits alike does, and is seen
  directly;
- the logarithm of the sum of exponentials, which all log-probabilities of the row hang on.

So a logit that is wrong by more than the tolerance is seen wherever it stands: what a sum allows is
the tolerance of one logit, not of its 16. The errors of fp32 have the room: tp 1 and tp 2 of plain
vLLM differ by 1.3e-5 in a logit of the demo model, and by 3.7e-5 in a sum. With equal signs it were
more, for the errors of a row lean to one side. What is lost is the values of most right logits,
which no test asks for.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

SIDE = 16
STRIDE = 32
LARGEST = 16
SIGNS = (-1.0) ** np.arange(SIDE)
NAMES = ("spread", "columns", "largest", "near", "apart", "logsumexp")
SUMS = ("near", "apart")
"""Those that add the errors of 16 logits up."""

Rows = Mapping[str, Any]
"""By what is kept: an array whose leading dimensions are those of the rows."""


def keep(rows: Any) -> dict[str, Any]:
    """(..., vocabulary) logits -> what is kept of them."""
    exact = np.asarray(rows, dtype=np.float64)
    short = [(0, 0)] * (exact.ndim - 1) + [(0, -exact.shape[-1] % SIDE**2)]
    squares = np.pad(exact, short).reshape(*exact.shape[:-1], -1, SIDE, SIDE)
    largest = np.argsort(-exact, axis=-1, kind="stable")[..., :LARGEST]
    top = np.take_along_axis(exact, largest, -1)
    spread = np.exp(exact - top[..., :1]).sum(-1, keepdims=True)
    return {
        "spread": exact[..., ::STRIDE].astype(np.float32),
        "columns": largest.astype(np.int32),
        "largest": top.astype(np.float32),
        "near": (squares * SIGNS).sum(-1).astype(np.float32),
        "apart": (squares * SIGNS[:, None]).sum(-2).astype(np.float32),
        "logsumexp": (top[..., :1] + np.log(spread)).astype(np.float32),
    }


def difference(row: Any, kept: Rows, *at: int) -> float:
    """Largest difference between one row and the one that is kept at this place."""
    return float(np.max(differences(row, kept, *at)))


def differences(row: Any, kept: Rows, *at: int) -> tuple[float, float]:
    """Largest difference of single values, and of sums, between one row and the one kept."""
    own = keep(row)
    # Two that are almost equal may have changed places: columns are looked up, not compared.
    own["looked up"] = np.asarray(row)[kept["columns"][at]]
    compared = {"looked up": kept["largest"][at]}
    compared |= {name: kept[name][at] for name in kept if name != "columns"}
    worst = {name: float(np.abs(own[name] - other).max()) for name, other in compared.items()}
    sums = [worst.pop(name) for name in SUMS]
    # A NaN is a difference, and `max` alone would hide it.
    return float(np.max(list(worst.values()))), float(np.max(sums))
