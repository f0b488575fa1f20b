"""What a rank measures of a switch, told once: how long it took to park, to swap, to step again."""

import time

from coordinator.protocol.messages.rank import SwitchTimes
from coordinator.protocol.switch_actions import Join, Leave, Move

RECENT_STEP_NS = 500_000_000
"""A rank whose last step ended less than this ago was at work when it was asked to switch."""


class SwitchClock:
    """The times of the switch under way; used by the rank's main loop alone."""

    def __init__(self) -> None:
        self._wanted_ns: dict[int, int] = {}
        self._unsent: list[SwitchTimes] = []
        self._ended_us: dict[int, int | None] = {}
        """When the last old step ended; 0 is unknown, None is not yet."""
        self._launched: tuple[int, int] | None = None
        """The switch whose first new step was launched meanwhile, and when."""
        self._first_step_of: int | None = None
        self._start_of: int | None = None

    def wanted(self, epoch: int) -> None:
        """The rank was asked for this epoch, perhaps again."""
        self._wanted_ns.setdefault(epoch, time.monotonic_ns())

    def made(self, move: Move, took_us: int, step_ended_ns: int | None) -> None:
        """The rank has made this move; its last step ended then, or is under way (None)."""
        match move:
            case Leave(directive=directive):
                self.parked(directive.stage.epoch, step_ended_ns)
            case Join(directive=directive):
                self.joined(directive.stage.epoch, took_us)
            case _:
                pass

    def parked(self, epoch: int, step_ended_ns: int | None) -> None:
        """The rank has left its group; its last step ended then, or is under way (None)."""
        now = time.monotonic_ns()
        self._launched = None
        self._ended_us = {epoch: None}
        if step_ended_ns is not None:
            was_at_work = now - step_ended_ns < RECENT_STEP_NS
            self._ended_us[epoch] = step_ended_ns // 1000 if was_at_work else 0
        took_us = (now - self._wanted_ns.get(epoch, now)) // 1000
        self._tell(SwitchTimes(epoch, park_us=took_us, old_end_us=self._ended_us[epoch] or 0))
        self._wanted_ns = {each: at for each, at in self._wanted_ns.items() if each >= epoch}

    def left(self, step_ended_ns: int) -> None:
        """The step that was under way when the rank left its group was over then."""
        ended_us = step_ended_ns // 1000
        for epoch in self._ended_us:
            self._ended_us[epoch] = ended_us
            self._tell(SwitchTimes(epoch, old_end_us=ended_us))
        launched, self._launched = self._launched, None
        if launched is not None:
            self._started(*launched)

    def copied(self, epoch: int, seconds: float, link_bytes: int) -> None:
        """The rank has pulled its share of the KV."""
        took_us = max(1, int(seconds * 1e6))
        self._tell(SwitchTimes(epoch, reshard_us=took_us, reshard_bytes=link_bytes))

    def joined(self, epoch: int, took_us: int) -> None:
        """The rank has selected its new mode."""
        self._start_of = epoch
        self._tell(SwitchTimes(epoch, swap_us=took_us))

    def begun(self, *, is_busy: bool) -> None:
        """The new group serves; only if it has work at once is the way to its first step told."""
        if not is_busy:
            self._start_of = None

    def leads(self, epoch: int) -> None:
        """This rank leads the new group: how long its first step takes is told."""
        self._first_step_of = epoch

    def stepped(self, started_ns: int, took_us: int | None) -> bool:
        """A step was launched here (`took_us` by a leader); True if there is news to report."""
        start_of, self._start_of = self._start_of, None
        if start_of is not None:
            if self._ended_us.get(start_of, 0) is None:
                self._launched = start_of, started_ns // 1000
            else:
                self._started(start_of, started_ns // 1000)
        first_of = self._first_step_of if took_us is not None else None
        if first_of is not None:
            self._tell(SwitchTimes(first_of, first_step_us=took_us or 0))
            self._first_step_of = None
        return start_of is not None or first_of is not None

    def _started(self, epoch: int, launched_us: int) -> None:
        """A step that was launched while the last old one was under way starts when that ends."""
        ended_us = self._ended_us.get(epoch) or 0
        start_us = max(launched_us, ended_us)
        self._tell(SwitchTimes(epoch, old_end_us=ended_us, new_start_us=start_us))

    def take(self) -> tuple[SwitchTimes, ...]:
        """What was measured since the last call."""
        unsent, self._unsent = self._unsent, []
        return tuple(unsent)

    def _tell(self, times: SwitchTimes) -> None:
        self._unsent.append(times)
