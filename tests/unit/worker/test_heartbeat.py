"""A process that stands still as a whole is seen by the one that forked it."""

import os
import signal
import time

from worker.launch.heartbeat import Heartbeat
from worker.launch.watchdog import Progress

POLL_S = 0.02
LIMIT_S = 0.2
WAIT_S = 20.0


def test_beats_are_seen_until_the_process_is_stopped() -> None:
    heartbeat = Heartbeat()
    assert (heartbeat.beats, heartbeat.passes) == (0, 0)
    pid = os.fork()
    if pid == 0:
        passes = 0
        while True:
            passes += 2
            heartbeat.beat(passes)
            time.sleep(POLL_S)
    progress = Progress(lambda: heartbeat.beats, LIMIT_S, POLL_S)
    try:
        ends = time.monotonic() + WAIT_S
        while heartbeat.beats < 5:
            assert time.monotonic() < ends
            if heartbeat.beats:
                progress.look(time.monotonic())
            assert not progress.is_stuck
            time.sleep(POLL_S)
        os.kill(pid, signal.SIGSTOP)
        while not progress.is_stuck:
            assert time.monotonic() < ends
            progress.look(time.monotonic())
            time.sleep(POLL_S)
        seen = heartbeat.beats
        time.sleep(2 * POLL_S)
        assert (heartbeat.beats, heartbeat.passes) == (seen, 2 * seen)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    heartbeat.close()
