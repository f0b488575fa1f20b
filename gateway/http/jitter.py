"""Spreads the next tries of clients that are refused together, so that they do not come together.

Called where refusals leave: by each answer, and by connections that are refused as such.
"""

import random
from typing import Final

from gateway.errors import RETRY_AFTER_MAX_S, ApiError

MOST: Final = 1.5
"""The longest wait that a client is told, of the shortest."""


def with_jitter(error: ApiError) -> ApiError:
    """Return the error with a wait of its own, if it is one to be tried again."""
    if error.status not in (429, 503):
        return error
    least_s = min(error.retry_after_s, RETRY_AFTER_MAX_S / MOST)
    return error.with_retry_after(round(least_s * random.uniform(1, MOST) * 1_000))
