"""A launched step whose tokens have not been collected yet.

Where steps run asynchronously, the leader launches the next step before it collects the tokens of
this one, so the device never waits. A prompt's step is the exception: a client waits for its first
token. If launches bounded the step, the device is done by the time they are over.
"""

from dataclasses import dataclass
from typing import Any

from comm_pool.layout import Group
from worker.io.host import Host

FIRST_TOKEN_WAIT_S = 0.0005
"""Maximum delay of the next launch for a first token; the device may idle that long."""

POLL_S = 0.00002


@dataclass(frozen=True, slots=True)
class InflightStep:
    """A launched step: its plan, and its result or a handle to wait for it."""

    plan: Any
    result: Any
    launched_ns: int = 0
    """Launch time on the host's monotonic clock."""
    mode: Any = None
    """The prepared mode that computes it."""
    group: Group | None = None
    epoch: int = 0
    """The epoch in which it was launched."""
    formation: int = 0
    """Its group's formation."""
    before: Any = None
    """The device's times of the step that was in flight when this one was planned; None if the host
    was not ahead of the device, or the device tells no times."""

    @property
    def began_ns(self) -> int:
        """When its computation began, as far as the host knows."""
        return getattr(self.result, "began_ns", self.launched_ns)

    @property
    def device_times(self) -> Any:
        """The device's own times of this step; None where it tells none."""
        return getattr(self.result, "device_times", None)

    def device_s(self) -> float | None:
        """Return how long the step took by the device's clock, in seconds, once it is over.

        If another was in flight before it, from the end of that one: what the device waits for the
        host in between is part of what a step costs.
        """
        times = self.device_times
        return float(times.seconds(self.before)) if times is not None else None

    @property
    def is_asynchronous(self) -> bool:
        """Whether its tokens must still be waited for."""
        return hasattr(self.result, "get_output")

    def tokens(self) -> Any:
        """Wait for the step's output."""
        return self.result.get_output() if self.is_asynchronous else self.result

    def is_ready(self) -> bool:
        """Return whether its tokens are available without waiting."""
        event = getattr(self.result, "copy_event", None)
        return event is None or bool(event.query())

    def goes_first(self, host: Host) -> bool:
        """Return whether to collect its tokens before the next launch: first tokens are there."""
        event = getattr(self.result, "copy_event", None)
        if event is None or not self.plan.reads_prompts:
            return False
        deadline_ns = host.now_ns() + int(FIRST_TOKEN_WAIT_S * 1e9)
        while not event.query():
            if host.now_ns() > deadline_ns:
                return False
            host.sleep(POLL_S)
        return True
