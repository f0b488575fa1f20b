"""Calls the main loop out of a group that has lost a member, and ends this process if it is stuck.

On CPU a collective with a dead peer can be aborted. On CUDA it may never end: custom all-reduce
spins for ever, and no thread of this process can stop it. The process is worth nothing then, since
its group is dissolved; its tasks go on elsewhere from what was delivered, as soon as it has ended.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

import structlog

from coordinator.protocol.messages import Binding
from worker.peer_loss import PeerLoss

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


def watch(
    loss: PeerLoss,
    progress: Progress,
    abort: Callable[[Binding], None],
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
                abort(binding)
            if loss.is_stuck(now_s):
                reason = "it does not leave a group that has lost a member"
                break
            if progress.is_stuck(now_s):
                reason = "its main loop does not go on"
                break
            time.sleep(POLL_S)
        log.warning("rank_stuck", reason=reason)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=run, name="watchdog", daemon=True).start()
