"""Stored answers for clients that repeat a request with the same `Idempotency-Key`.

A finished answer that was not streamed is replayed unchanged for a day. While the first request is
still being answered, a second one is refused for now, and the edge asks again. Errors are not
stored: clients retry after them. In memory, so per gateway; `shared_idempotency` stores answers for
all gateways. Pure.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from gateway.errors import ApiError, api_error

IDEMPOTENCY_HEADER: Final = "idempotency-key"
RETENTION_S = 24 * 3_600
KEY_CHARS_MAX = 255
ANSWER_BYTES_MAX = 1024**2
"""A larger answer is not stored."""
BYTES_MAX = 64 * 1024**2
"""Most bytes of all stored answers; the oldest go first."""
KEYS_MAX = 10_000
IN_PROGRESS: Final = "request_in_progress"
"""Code of the error for a request that is being answered."""

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A finished answer."""

    status: int
    headers: Headers
    body: bytes


@dataclass(slots=True)
class _Slot:
    request: bytes
    until_s: float
    answer: StoredAnswer | None = None

    @property
    def size(self) -> int:
        return len(self.answer.body) if self.answer else 0


def check_key(key: str) -> ApiError | None:
    """Return the error in an `Idempotency-Key`, if any."""
    if 0 < len(key) <= KEY_CHARS_MAX and key.isprintable():
        return None
    text = f"Idempotency-Key must be 1 to {KEY_CHARS_MAX} printable characters."
    return api_error("invalid_value", text, IDEMPOTENCY_HEADER)


def used_for_another() -> ApiError:
    """Return the error for a key that belongs to another request."""
    text = "This Idempotency-Key was used for another request: use a fresh one for each."
    return api_error("invalid_value", text, IDEMPOTENCY_HEADER)


def being_answered() -> ApiError:
    """Return the error for a key whose first request has no answer yet."""
    text = "The first request with this key is still being answered: try again soon."
    return api_error(IN_PROGRESS, text)


class IdempotencyCache:
    """The answers of one gateway."""

    def __init__(self) -> None:
        self._slots: OrderedDict[tuple[str, str], _Slot] = OrderedDict()
        self._bytes = 0

    def has(self, place: tuple[str, str], now_s: float) -> bool:
        """Return whether a request with this tenant and key began here and is not forgotten."""
        slot = self._slots.get(place)
        return slot is not None and (slot.answer is None or now_s < slot.until_s)

    def begin(
        self, tenant: str, key: str, request: bytes, now_s: float
    ) -> StoredAnswer | ApiError | None:
        """Return the stored answer or an error; after None, answer it and call `end`.

        `request` identifies the request: equal values mean the same request.
        """
        slot = self._slots.get((tenant, key))
        if slot is not None and slot.answer is not None and now_s >= slot.until_s:
            self._drop((tenant, key))
            slot = None
        if slot is None:
            self._slots[tenant, key] = _Slot(request, now_s + RETENTION_S)
            return None
        if slot.request != request:
            return used_for_another()
        if slot.answer is None:
            return being_answered()
        return slot.answer

    def end(self, tenant: str, key: str, answer: StoredAnswer | None) -> None:
        """Store the answer; without a storable one, the next request with the key is a new one."""
        if answer is None or len(answer.body) > ANSWER_BYTES_MAX:
            self._drop((tenant, key))
            return
        self._slots[tenant, key].answer = answer
        self._slots.move_to_end((tenant, key))
        self._bytes += len(answer.body)
        for oldest in list(self._slots):
            if self._bytes <= BYTES_MAX and len(self._slots) <= KEYS_MAX:
                break
            if self._slots[oldest].answer is not None:
                self._drop(oldest)

    def _drop(self, place: tuple[str, str]) -> None:
        self._bytes -= self._slots.pop(place).size
