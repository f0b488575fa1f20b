"""The parent of several gateway processes, with children that do nothing but live."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.harness.cells.servers import ROOT

PARENT = """
import signal, sys, time
from gateway.prefork import PreforkServer

def serve(announce):
    stops = []
    signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
    announce("ready")
    while not stops:
        time.sleep(0.01)
    if sys.argv[1] != "0":
        raise ValueError("it cannot end well")

sys.exit(PreforkServer(2, serve).run(lambda line: print(line, flush=True)))
"""
ENDS_WITHIN_S = 20


@contextmanager
def parent(fails: int = 0) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A parent whose children are ready, and their pids; they fail when told to stop, or not."""
    command = [sys.executable, "-c", PARENT, str(fails)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process, [each.pid for each in psutil.Process(process.pid).children()]
        finally:
            for each in psutil.Process(process.pid).children() if process.poll() is None else ():
                each.kill()
            process.kill()


def until_dead(pid: int) -> None:
    """Return when the process is dead, whether its parent knows it or not."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(("fails", "code"), [(0, 0), (1, 2)])
def test_it_ends_as_its_children_do(fails: int, code: int) -> None:
    with parent(fails) as (process, pids):
        assert len(pids) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDS_WITHIN_S) == code


def test_who_died_before_the_others_were_told_to_stop_does_not_count() -> None:
    with parent() as (process, pids):
        # Held so that it hears of both at once.
        process.send_signal(signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        until_dead(pids[0])
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        assert process.wait(ENDS_WITHIN_S) == 0


def test_who_dies_while_it_stops_does() -> None:
    with parent() as (process, pids):
        os.kill(pids[0], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        until_dead(pids[1])
        os.kill(pids[0], signal.SIGKILL)
        assert process.wait(ENDS_WITHIN_S) == signal.SIGKILL
