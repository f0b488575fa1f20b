"""Aborts the main loop's formation when it has lost a member, and kills a stuck process.

On CPU a collective with a dead peer raises once the formation is marked. On CUDA it would never
end, so the watchdog unblocks its kernels, after the mark, since their results are invalid. If they
still do not end, no thread can stop them. The watchdog then kills the process, which is useless
since its group is dissolved; its tasks resume elsewhere after the last delivered token.
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
from worker.launch.peer_failure import Loss, PeerFailure

log = structlog.get_logger()

POLL_S = 0.1
UNBLOCK_POLL_S = 0.01
"""Pause between two tries to unblock the rank; on CUDA each of them takes up to 0.1 s."""


class Progress:
    """Detects progress by a number that grows: the passes of a main loop, or heartbeats.

    Time counts only while the observer itself runs, so a process that was stopped as a whole does
    not find itself stuck.
    """

    def __init__(self, passes: Callable[[], int], limit_s: float, poll_s: float = POLL_S) -> None:
        self._passes = passes
        self._limit_s = limit_s
        self._poll_s = poll_s
        self._last_passes = -1
        self._still_s = 0.0
        self._last_poll_s: float | None = None

    @property
    def passes(self) -> int:
        """How far the loop is now."""
        return self._passes()

    @property
    def is_stuck(self) -> bool:
        """Whether nothing has moved for longer than the limit, as of the last look."""
        return self._still_s > self._limit_s

    def look(self, now_s: float) -> None:
        """Note how far the loop is; call it every `poll_s`."""
        last_poll_s, self._last_poll_s = self._last_poll_s, now_s
        last_passes, self._last_passes = self._last_passes, self._passes()
        if last_passes != self._last_passes or last_poll_s is None:
            self._still_s = 0.0
        else:
            self._still_s += min(now_s - last_poll_s, 2 * self._poll_s)


class Communicators(Protocol):
    """What the watchdog needs from a rank's communicators."""

    def abort(self, ranks: tuple[Rank, ...], formation: int) -> None:
        """Mark a formation as aborted."""

    def unblock(self, ranks: tuple[Rank, ...], is_wanted: Callable[[], bool]) -> None:
        """Abort this rank's collectives of the group, as long as `is_wanted` returns true."""


def abort_formation(
    lost: Loss, communicators: Communicators, degraded_binding: Callable[[], Binding | None]
) -> None:
    """Abort a formation that lacks a member, and unblock this rank from it if necessary.

    A detached step is never unblocked: tasks may have migrated with its results, so it completes or
    this process ends.
    """
    binding = lost.binding
    communicators.abort(binding.group.ranks, binding.formation)
    if not lost.must_unblock:
        return
    try:
        communicators.unblock(binding.group.ranks, lambda: degraded_binding() == binding)
    except Exception:  # The watchdog must survive: it still has to kill the process.
        log.exception("unblock_failed", group=binding.group.name)


def watch(
    loss: PeerFailure,
    progress: Progress,
    abort: Callable[[Loss], None],
    beat: Callable[[int], None],
    wake: threading.Event,
) -> None:
    """Start a thread that aborts formations that lack a member and kills a stuck process.

    It calls `beat` on every poll with the loop's passes, which stand still while the rank computes
    in a group that lacks a member, and polls at once when `wake` is set.
    """

    def run() -> None:
        passes = 0
        while True:
            wake.clear()
            now_s = time.monotonic()
            lost = loss.look(now_s)
            passes = progress.passes if lost is None else passes
            beat(passes)
            if lost is not None:
                abort(lost)
            if loss.is_stuck(now_s):
                reason = "it has not left a group that lost a member"
                break
            progress.look(now_s)
            if progress.is_stuck:
                reason = "its main loop makes no progress"
                break
            wake.wait(UNBLOCK_POLL_S if lost is not None and lost.must_unblock else POLL_S)
        log.warning("rank_stuck", reason=reason)
        # Dump where it is stuck; the signal leaves no other trace.
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=run, name="watchdog", daemon=True).start()
