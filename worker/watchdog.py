"""Ends this process if its main loop is stuck in a group that has lost a member.

A collective with a dead peer may never end: vLLM's shared-memory and custom all-reduce spin for
ever, and no thread of this process can stop them. The process is worth nothing then, since its
group is dissolved; its tasks go on elsewhere from what was delivered, as soon as it has ended.
"""

import os
import signal
import threading
import time

import structlog

from worker.peer_loss import PeerLoss

log = structlog.get_logger()

POLL_S = 0.1


def watch(loss: PeerLoss) -> None:
    """Start a thread that kills this process when it is stuck."""

    def run() -> None:
        while not loss.is_stuck(time.monotonic()):
            time.sleep(POLL_S)
        log.warning("rank_stuck", reason="it does not leave a group that has lost a member")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=run, name="watchdog", daemon=True).start()
