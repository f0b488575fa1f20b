"""When a main loop that does not go on counts as stuck, and how it is called out of a group."""

import signal
import subprocess
import sys
from collections.abc import Callable
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Binding, Carry, Phase
from tests.harness.coordinator.builders import directive, target
from worker.launch import watchdog
from worker.launch.peer_failure import GRACE_S, Loss, PeerFailure
from worker.launch.watchdog import POLL_S, Progress, abort_formation, watch

LIMIT_S = 2.0
PATIENCE_S = 20.0


class Loop:
    def __init__(self) -> None:
        self.passes = 0
        self.now_s = 100.0
        self.progress = Progress(lambda: self.passes, LIMIT_S)

    def looks(self, seconds: float) -> bool:
        """Look every `POLL_S` for so long; says whether it was ever found stuck."""
        stuck = False
        for _ in range(round(seconds / POLL_S)):
            self.now_s += POLL_S
            self.progress.look(self.now_s)
            stuck |= self.progress.is_stuck
        return stuck


def test_a_loop_that_stands_still_is_stuck_after_the_limit_and_not_before() -> None:
    loop = Loop()
    assert not loop.looks(LIMIT_S - 2 * POLL_S)
    assert loop.looks(1.0)


def test_a_loop_that_goes_on_now_and_then_is_not() -> None:
    loop = Loop()
    for _ in range(5):
        loop.passes += 1
        assert not loop.looks(LIMIT_S - 2 * POLL_S)


def test_a_process_that_was_stopped_as_a_whole_is_not_stuck() -> None:
    loop = Loop()
    assert not loop.looks(1.0)
    loop.now_s += 3_600.0
    assert not loop.looks(2 * POLL_S)
    assert loop.looks(LIMIT_S)


TP2 = target("tp2+dp2", 1)


class Communicators:
    """Tells what is asked of it, in order."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.is_wanted: list[bool] = []
        self.during: Callable[[], None] = lambda: None

    def abort(self, ranks: tuple[Rank, ...], formation: int) -> None:
        self.asked.append(("mark", ranks, formation))

    def unblock(self, ranks: tuple[Rank, ...], is_wanted: Callable[[], bool]) -> None:
        self.asked.append(("let out", ranks))
        self.is_wanted.append(is_wanted())
        self.during()
        self.is_wanted.append(is_wanted())


class Watched:
    """A rank that serves in tp2, and hears of a layout without rank 1, or itself."""

    def __init__(self, rank: int, lost: str) -> None:
        self.participant = SwitchParticipant(Rank(rank), 1)
        for phase in (Phase.PARK, Phase.SWAP):
            self.hear(directive(TP2, 1, phase))
        self.loss = PeerFailure(self.participant, LIMIT_S)
        self.without = directive(target(f"{lost}+dp2", 2), 2, Phase.PARK, carry=Carry.RECOMPUTE)
        self.loss.heard(self.without)
        self.communicators = Communicators()

    def hear(self, message: object) -> None:
        self.participant.on_directive(message)  # type: ignore[arg-type]
        while (move := self.participant.next_move(idle=True)) is not None:
            self.participant.made(move)

    def call_out(self, after_s: float = GRACE_S) -> list[object]:
        """What is asked of the communicators so long after it was known first."""
        self.loss.look(0.0)
        if (lost := self.loss.look(after_s)) is not None:
            abort_formation(lost, self.communicators, self.loss.degraded_binding)
        return self.communicators.asked


MARKED = ("mark", (0, 1), 1)


def test_a_survivor_is_let_out_behind_the_mark_until_it_has_left() -> None:
    watched = Watched(0, "dp1+off1")
    watched.communicators.during = lambda: watched.hear(watched.without)
    assert watched.call_out() == [MARKED, ("let out", (0, 1))]
    assert watched.communicators.is_wanted == [True, False]
    assert watched.call_out()[2:] == [], "it has left"


def test_a_rank_has_time_to_come_out_by_itself() -> None:
    """Then its group can be formed again."""
    watched = Watched(0, "dp1+off1")
    assert watched.call_out(after_s=GRACE_S - 0.01) == [MARKED]
    assert watched.call_out(after_s=GRACE_S) == [MARKED, MARKED, ("let out", (0, 1))]


def test_who_was_lost_itself_is_only_marked() -> None:
    assert Watched(1, "dp1+off1").call_out() == [MARKED]


def test_who_was_let_out_has_to_leave_even_if_its_peer_comes_back() -> None:
    watched = Watched(0, "dp1+off1")
    back = directive(target("tp2+dp2", 3), 3, Phase.PARK, carry=Carry.RECOMPUTE)
    watched.loss.heard(back)
    assert watched.loss.degraded_binding() is None, "nothing was done that cannot be undone"
    watched.loss.heard(watched.without)
    assert watched.call_out() == [MARKED, ("let out", (0, 1))]
    watched.loss.heard(back)
    assert watched.loss.degraded_binding() == TP2.bindings[0]
    assert watched.call_out()[2:] == [MARKED, ("let out", (0, 1))]
    watched.hear(back)
    assert watched.loss.degraded_binding() is None, "it has left"


def test_a_rank_whose_place_another_process_has_taken_is_only_marked() -> None:
    watched = Watched(1, "dp1+off1")
    watched.loss.heard(directive(target("dp4", 3), 3, Phase.PARK, members={1: 2}))
    assert watched.loss.degraded_binding() == TP2.bindings[0]
    assert watched.call_out() == [MARKED]


def test_a_group_that_was_left_with_its_last_step_under_way_is_only_marked() -> None:
    watched = Watched(0, "dp1+off1")
    joined = watched.participant.joined
    assert joined is not None
    watched.hear(watched.without)
    watched.loss = PeerFailure(watched.participant, LIMIT_S, lambda: (joined,))
    watched.loss.heard(watched.without)
    assert watched.loss.degraded_binding() == TP2.bindings[0]
    assert watched.call_out() == [MARKED]


def test_the_watchdog_goes_on_when_there_is_no_way_out() -> None:
    watched = Watched(0, "dp1+off1")

    def fail() -> None:
        raise RuntimeError("CUDA error")

    watched.communicators.during = fail
    with capture_logs() as logs:
        watched.call_out()
    assert [each["event"] for each in logs] == ["unblock_failed"]
    assert watched.loss.is_stuck(LIMIT_S + 0.1), "and ends the process"


STUCK = """
import time
from threading import Event
from types import SimpleNamespace
from worker.launch.watchdog import Progress, watch

def waits_for_what_never_comes():
    time.sleep(60)

loss = SimpleNamespace(look=lambda now_s: None, is_stuck=lambda now_s: False)
watch(loss, Progress(lambda: 1, 0.3), lambda *_: None, lambda _: None, Event())
waits_for_what_never_comes()
"""


def test_the_watchdog_looks_at_once_if_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "POLL_S", 1e9)
    looks, beats, wake, looked = [], list[int](), Event(), Event()

    def look(now_s: float) -> None:
        looks.append(now_s)
        looked.set()

    loss: Any = SimpleNamespace(look=look, is_stuck=lambda _now_s: False)
    watch(loss, Progress(lambda: 1, 1e9), lambda _: None, beats.append, wake)
    for number in range(1, 4):
        assert looked.wait(PATIENCE_S)
        assert len(looks) == number
        assert beats == [1] * number, "a beat has the passes of the loop"
        looked.clear()
        wake.set()


def test_a_beat_shows_no_pass_while_a_group_of_the_rank_lacks_a_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where its main loop serves on: in a group that it has left, a step may never end."""
    monkeypatch.setattr(watchdog, "POLL_S", 0.001)
    lost = Loss(Binding(Group((Rank(0), Rank(1)), Mode.TP), 1), must_unblock=False)
    losses, loop, beats, done = [None, lost, lost, None], Loop(), list[int](), Event()

    def look(_now_s: float) -> Loss | None:
        if loop.passes == len(losses):
            done.set()
            Event().wait()
        loop.passes += 1
        return losses[loop.passes - 1]

    loss: Any = SimpleNamespace(look=look, is_stuck=lambda _now_s: False)
    watch(loss, Progress(lambda: loop.passes, 1e9), lambda _: None, beats.append, Event())
    assert done.wait(PATIENCE_S)
    assert beats == [1, 1, 1, 4]


def test_a_stuck_process_says_where_before_it_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert "rank_stuck" in ended.stdout + ended.stderr
    assert "in waits_for_what_never_comes" in ended.stderr
