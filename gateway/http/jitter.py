"""Spreads the retries of clients that are refused together, so that they do not return together.

Called for every refusal: by its answer, or by the refused connection.
"""

import random
from typing import Final

from gateway.errors import RETRY_AFTER_MAX_S, ApiError

MOST: Final = 1.5
"""Longest wait sent to a client, as a multiple of the shortest."""


def with_jitter(error: ApiError) -> ApiError:
    """Return a retryable error with a randomised wait, any other unchanged."""
    if error.status not in (429, 503):
        return error
    least_s = min(error.retry_after_s, RETRY_AFTER_MAX_S / MOST)
    return error.with_retry_after(round(least_s * random.uniform(1, MOST) * 1_000))
