"""Times of a switch that a rank reports once: to park, to swap, to step again.

Pure: times are arguments, of the host's monotonic clock.
"""

from coordinator.protocol.messages.rank import SwitchTimes
from coordinator.protocol.switch_actions import Join, Leave, Move

RECENT_STEP_NS = 500_000_000
"""A rank counts as busy at a switch if its last step ended less than this ago."""


class SwitchClock:
    """The times of the current switch."""

    def __init__(self) -> None:
        self._wanted_ns: dict[int, int] = {}
        self._unsent: list[SwitchTimes] = []
        self._ended_us: dict[int, int | None] = {}
        """When the last old step ended; 0 means unknown, None not yet."""
        self._launched: tuple[int, int] | None = None
        """Epoch and launch time of a first new step launched while the old one was in flight."""
        self._first_step_of: int | None = None
        self._start_of: int | None = None

    def wanted(self, epoch: int, now_ns: int) -> None:
        """Note that a directive, new or repeated, asked for this epoch."""
        self._wanted_ns.setdefault(epoch, now_ns)

    def made(self, move: Move, took_us: int, step_ended_ns: int | None, now_ns: int) -> None:
        """Note a completed action; the last step ended at `step_ended_ns`, or is in flight."""
        match move:
            case Leave(directive=directive):
                self.parked(directive.stage.epoch, step_ended_ns, now_ns)
            case Join(directive=directive):
                self.joined(directive.stage.epoch, took_us)
            case _:
                pass

    def parked(self, epoch: int, step_ended_ns: int | None, now_ns: int) -> None:
        """Note that the rank left its group; None means that its last step is in flight."""
        self._launched = None
        self._ended_us = {epoch: None}
        if step_ended_ns is not None:
            was_busy = now_ns - step_ended_ns < RECENT_STEP_NS
            self._ended_us[epoch] = step_ended_ns // 1000 if was_busy else 0
        took_us = (now_ns - self._wanted_ns.get(epoch, now_ns)) // 1000
        self._tell(SwitchTimes(epoch, park_us=took_us, old_end_us=self._ended_us[epoch] or 0))
        self._wanted_ns = {each: at for each, at in self._wanted_ns.items() if each >= epoch}

    def quiesced(self, step_ended_ns: int) -> None:
        """Note that the detached step ended at this time."""
        ended_us = step_ended_ns // 1000
        for epoch in self._ended_us:
            self._ended_us[epoch] = ended_us
            self._tell(SwitchTimes(epoch, old_end_us=ended_us))
        launched, self._launched = self._launched, None
        if launched is not None:
            self._started(*launched)

    def copied(self, epoch: int, seconds: float, link_bytes: int) -> None:
        """Note that the rank has pulled its share of the KV."""
        took_us = max(1, int(seconds * 1e6))
        self._tell(SwitchTimes(epoch, reshard_us=took_us, reshard_bytes=link_bytes))

    def joined(self, epoch: int, took_us: int) -> None:
        """Note that the rank has selected its new mode."""
        self._start_of = epoch
        self._tell(SwitchTimes(epoch, swap_us=took_us))

    def begun(self, *, is_busy: bool) -> None:
        """Note that the new group serves; its first step is timed only if it has work at once."""
        if not is_busy:
            self._start_of = None

    def leads(self, epoch: int) -> None:
        """Note that this rank leads the new group, so it reports the time of its first step."""
        self._first_step_of = epoch

    def stepped(self, started_ns: int, took_us: int | None) -> bool:
        """Note a launched step (`took_us`: of a leader); return whether there is news to report."""
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
        """Report the first new step; if the last old one was in flight, it starts after that."""
        ended_us = self._ended_us.get(epoch) or 0
        start_us = max(launched_us, ended_us)
        self._tell(SwitchTimes(epoch, old_end_us=ended_us, new_start_us=start_us))

    def take(self) -> tuple[SwitchTimes, ...]:
        """Return the times measured since the last call."""
        unsent, self._unsent = self._unsent, []
        return tuple(unsent)

    def _tell(self, times: SwitchTimes) -> None:
        self._unsent.append(times)
