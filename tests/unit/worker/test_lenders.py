"""Steps that borrow count only while all lenders live."""

import os
import signal
import subprocess
import sys

import pytest

from comm_pool.layout import Mode
from worker.engine.counters import LoanCounts
from worker.engine.weights.lenders import LenderLostError, check_lenders, is_ending
from worker.engine.weights.ring import LoanRing


def test_a_lender_that_was_killed_is_noticed_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    counts = LoanCounts({Mode.DP: (LoanRing(()),)}, lenders=(os.getpid(), child.pid))
    counts.check(Mode.DP)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(child.pid)
    with pytest.raises(LenderLostError, match="start together"):
        counts.check(Mode.DP)
    counts.check(Mode.TP)  # It has read nothing of others.
    child.communicate()
    assert is_ending(child.pid)
    check_lenders(())
