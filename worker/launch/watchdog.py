"""Calls the main loop out of a group that has lost a member, and ends this process if it is stuck.

On CPU a collective with a dead peer raises once it is marked. On CUDA it would never end: its
kernels are let through, so that what they compute means nothing, and the mark is there before. If
they do not come to their end even so, no thread can stop them, and the process is worth nothing,
since its group is dissolved; its tasks go on elsewhere from what was delivered, when it has ended.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from comm_pool.layout import Rank
from coordinator.protocol.terms import Binding
from worker.launch.peer_failure import PeerFailure

log = structlog.get_logger()

POLL_S = 0.1


class Progress:
    """Whether something goes on, by a number that grows: the passes of a main loop, or beats.

    Time counts only where the one who looks went on itself: a process that was stopped as a whole
    does not find that it is stuck.
    """

    def __init__(self, passes: Callable[[], int], limit_s: float, poll_s: float = POLL_S) -> None:
        self._passes = passes
        self._limit_s = limit_s
        self._poll_s = poll_s
        self._seen = -1
        self._still_s = 0.0
        self._looked_at_s: float | None = None

    def is_stuck(self, now_s: float) -> bool:
        """Say whether no pass has begun for longer than the limit; asked every `poll_s`."""
        before, self._looked_at_s = self._looked_at_s, now_s
        seen, self._seen = self._seen, self._passes()
        if seen != self._seen or before is None:
            self._still_s = 0.0
            return False
        self._still_s += min(now_s - before, 2 * self._poll_s)
        return self._still_s > self._limit_s


class Communicators(Protocol):
    """The part of a rank's communicators that is used here."""

    def abort(self, ranks: tuple[Rank, ...], formation: int) -> None:
        """Mark a formation as aborted."""

    def unblock(self, ranks: tuple[Rank, ...], is_wanted: Callable[[], bool]) -> None:
        """Let this rank out of its collectives, as long as that is wanted."""


def call_out(
    binding: Binding, loss: PeerFailure, communicators: Communicators, now_s: float
) -> None:
    """Abort a formation that lacks a member, and let this rank out of it if it has to be.

    Not if it has left the group, and only its last step is under way: tasks may have moved on with
    what that computes, so it counts or this process ends.
    """
    ranks = binding.group.ranks
    communicators.abort(ranks, binding.formation)
    if not loss.must_be_let_out(now_s):
        return
    try:
        communicators.unblock(ranks, lambda: loss.bereaved() == binding)
    except Exception:  # The last resort must not end with the thread that takes it.
        log.exception("not_let_out", group=binding.group.name)


def watch(
    loss: PeerFailure,
    progress: Progress,
    abort: Callable[[Binding, float], None],
    beat: Callable[[], None],
) -> None:
    """Start a thread that aborts formations which lack a member, and kills a stuck process.

    It calls `beat` each time that it looks.
    """

    def run() -> None:
        while True:
            beat()
            now_s = time.monotonic()
            if (binding := loss.bereaved()) is not None:
                abort(binding, now_s)
            if loss.is_stuck(now_s):
                reason = "it does not leave a group that has lost a member"
                break
            if progress.is_stuck(now_s):
                reason = "its main loop does not go on"
                break
            time.sleep(POLL_S)
        log.warning("rank_stuck", reason=reason)
        # Where it is stuck; the signal leaves no other trace.
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=run, name="watchdog", daemon=True).start()
