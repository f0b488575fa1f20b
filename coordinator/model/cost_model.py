"""The cost of a group per width and mode: step times and capacity; and the cost of a switch.

Built from the curves that ranks measured at start-up, and updated from served steps. The measured
curves stay in it as a fixed number of steps, so that a load of one shape cannot displace the
others. `predict` calls this module, and the simulator in place of a GPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from comm_pool.layout import Mode, step_name
from coordinator.model.step_line import StepLine, fit, mean_ratio, plus, scaled, sums_of
from coordinator.protocol.messages.steps import AT_FLOOR, ServedSteps, StepSums, WidthTimes

PRIOR_STEPS = 20.0
"""Weight of one start-up measurement, in served steps."""

STEPS_REMEMBERED = 2_000.0
"""Served steps fade: after this many newer steps, one counts half."""

OFF_MAX = 0.2
"""Start-up measurements that served steps contradict by more than this share are scaled."""

SERVED_MIN = 50
"""Fewer served steps contradict nothing."""

CHUNK_TOKENS = 8_192
"""Most tokens of a step, unless a measurement says otherwise."""


@dataclass(frozen=True, slots=True)
class GroupCost:
    """The cost of a group of one width and mode: step times in seconds, KV in tokens.

    `prefill` differs from `decode` in shift groups, which compute large steps in sp. A step that
    borrows takes at least its floor, so small ones take equally long. A step of a pipeline group
    stands for one of each stage, as many as there are stages: each task gets a token.
    """

    decode: StepLine
    prefill: StepLine
    capacity_tokens: int
    tasks_max: int = 1_024
    chunk_tokens: int = CHUNK_TOKENS
    floor_s: float = 0.0
    """The least time of a step in the mode of `decode`; 0 if it borrows nothing."""
    prefill_floor_s: float = 0.0
    """The same in the mode of `prefill`, if that is another one."""
    stages: int = 1
    """The pipeline stages that a step passes."""

    def step_s(self, tokens: float, context: float) -> float:
        """Seconds of a step, in the faster mode."""
        decode = max(self.floor_s, self.decode.seconds(tokens, context))
        if self.prefill is self.decode:
            return decode
        return min(decode, max(self.prefill_floor_s, self.prefill.seconds(tokens, context)))

    def compute_s(self, tokens: float, context: float) -> float:
        """Seconds of what a step computes: what it adds to a step that has other work too."""
        decode = self.decode.seconds(tokens, context)
        if self.prefill is self.decode:
            return decode
        return min(decode, max(self.prefill_floor_s, self.prefill.seconds(tokens, context)))

    def first_s(self, prompt: float) -> float:
        """Seconds from the first step of a prompt to its last, if nothing else is computed."""
        steps = -(-prompt * self.stages // self.chunk_tokens)
        if self.stages == 1:
            compute_s = self.step_s(prompt, 0.0) + (steps - 1) * self.decode.base_s
            return max(compute_s, steps * self.floor_s)
        # Steps follow each other through the stages, each a stage after the one before.
        line, chunk = self.decode, min(prompt, self.chunk_tokens / self.stages)
        others = self.stages - 1
        return (steps + others) * line.base_s / self.stages + line.token_s * (
            prompt + others * chunk
        )

    @property
    def rest_s(self) -> float:
        """Seconds of a step that computes nothing."""
        return max(self.floor_s, self.decode.base_s)


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """The cost of a switch: a pause, and moving the KV of running tasks over the links."""

    pause_s: float = 0.05
    kv_bytes_per_token: float = 0.0
    bytes_per_s: float = 100e9

    def seconds(self, context_tokens: float) -> float:
        """The time in which groups that change compute nothing."""
        return self.pause_s + self.kv_bytes_per_token * context_tokens / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs by the name of mode and width, such as `tp2`; a dp rank is `dp1`."""

    groups: Mapping[str, GroupCost]
    switch: SwitchCost = field(default_factory=SwitchCost)

    def of(self, mode: Mode, width: int) -> GroupCost | None:
        """Return the cost of a group, or None if it is unknown."""
        return self.groups.get(f"{mode}{width}")


class StepFits:
    """Lines by mode and width, such as `tp2`, fitted to start-up measurements and served steps.

    Steps at their floor are no part of a line: it would be flat.
    """

    __slots__ = ("_lines", "_priors", "_served")

    def __init__(self) -> None:
        self._priors: dict[str, StepSums] = {}
        self._served: dict[str, StepSums] = {}
        self._lines: dict[str, StepLine] = {}

    @property
    def is_empty(self) -> bool:
        """True while nothing is known."""
        return not self._lines

    def line(self, name: str) -> StepLine | None:
        """Return the line of groups of this name, or None if it is unknown."""
        return self._lines.get(name)

    def add_curves(self, times: Sequence[WidthTimes], context_share: float = 0.0) -> None:
        """Add the curves of a start-up.

        They are measured without context, so the caller gives a first estimate: reading a token's
        KV takes `context_share` of reading all weights, which is most of a short step.
        """
        for each in times:
            floors_us = dict(each.floor_us)
            for mode, points in each.curves:
                if (name := _group_name(mode, each.width)) is None:
                    continue  # Layouts of mixed groups are no candidates.
                floor_us = floors_us.get(mode, 0)
                shortest_s = min(us for _, us in points) * 1e-6
                if floor_us:
                    shortest_s = _shortest_s(times, each.width) or shortest_s
                per_million_s = shortest_s * context_share * 1e6
                steps = []
                for tokens, us in _above(points, floor_us):
                    seconds = us * 1e-6
                    steps.append((tokens, 0.0, seconds))
                    # Enough context to make the step half as long again.
                    if per_million_s > 0:
                        context = 0.5 * seconds / per_million_s * 1e6
                        steps.append((tokens, context, 1.5 * seconds))
                self._priors[name] = sums_of(steps, PRIOR_STEPS)
                self._refit(name)

    def add_steps(self, steps: Iterable[ServedSteps]) -> None:
        """Add the steps that a leader served since its last report."""
        for each in steps:
            before = self._served.get(each.name, StepSums())
            keep = 0.5 ** (each.sums.steps / STEPS_REMEMBERED)
            self._served[each.name] = plus(before, each.sums, keep)
            self._refit(each.name)

    def _refit(self, name: str) -> None:
        prior, served = self._priors.get(name, StepSums()), self._served.get(name, StepSums())
        line = fit(plus(_recalibrated(prior, served), served))
        if line is not None and (line.base_s > 0 or line.token_s > 0):
            self._lines[name] = line


def _group_name(mode: str, width: int) -> str | None:
    """Return the name of the groups whose steps a curve has; None for mixed ones."""
    if mode in set(Mode):
        return step_name(Mode(mode), width)
    return mode if mode.startswith(Mode.PP) else None


def _recalibrated(prior: StepSums, served: StepSums) -> StepSums:
    """Return the start-up measurements, scaled to the level of served steps if they are far off.

    A start-up measurement may be too slow or too fast as a whole, because a device was not warm or
    because requests cost something that dummy steps do not have. Its shape is still right, also for
    sizes that no step has had yet.
    """
    line = fit(prior) if prior.steps and served.steps >= SERVED_MIN else None
    if line is None:
        return prior
    ratio = mean_ratio(line, served)
    return prior if abs(ratio - 1) <= OFF_MAX else scaled(prior, 1 / ratio)


def floors_us(times: Iterable[WidthTimes], width: int) -> dict[str, int]:
    """Return the floor of each mode of this width that borrows, in microseconds.

    `times` are those of all ranks that count. They may hold different numbers of whole layers, so
    the one with the longest loans decides: any group may have it as a member.
    """
    longest: dict[str, int] = {}
    for each in times:
        if each.width == width:
            for name, floor_us in each.floor_us:
                longest[name] = max(floor_us, longest.get(name, 0))
    return longest


def _above(points: Sequence[tuple[int, int]], floor_us: int) -> list[tuple[float, float]]:
    """Return the (tokens, µs) points above the floor, at least two.

    If there are fewer, the line begins at 0: then it is right at the largest step, and what it says
    of small ones is likely to be below the floor.
    """
    above = [(float(tokens), float(us)) for tokens, us in points if us > AT_FLOOR * floor_us]
    if not floor_us or len(above) > 1:
        return above
    tokens, us = points[-1]
    return [(tokens / 2, us / 2), (float(tokens), float(us))]


def _shortest_s(times: Iterable[WidthTimes], width: int) -> float | None:
    """Return the time that groups of this width would take to read their weights, in seconds.

    By the shortest steps of groups that borrow nothing, whose members read a share each; None if
    there are none.
    """
    found = [
        each.width * us * 1e-6 / width
        for each in times
        for name, points in each.curves
        if name not in dict(each.floor_us)
        for _, us in points
    ]
    return min(found, default=None)
