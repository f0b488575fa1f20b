"""When a main loop that does not go on counts as stuck."""

from worker.watchdog import POLL_S, Progress

LIMIT_S = 2.0


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
            stuck |= self.progress.is_stuck(self.now_s)
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
