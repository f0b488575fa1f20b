"""Step times that ranks report: measured at start-up, and of served steps.

Plain values without a tag of their own on the wire.
"""

import msgspec

from comm_pool.layout import Mode, step_name
from comm_pool.mixed import Staged

AT_FLOOR = 1.05
"""A step that takes at most this multiple of its floor says nothing about what it computes."""


class WidthTimes(msgspec.Struct, frozen=True):
    """How long steps take in groups of a width, as measured at start-up.

    `curves` gives (tokens, µs) points, tokens ascending, for each mode in which the rank can
    compute a step (`dp`, `tp`, `sp`, or mixed ones as layouts write them). A shift group computes
    steps of at least `sp_from_tokens` tokens in sp; None is never. `mixed_from_tokens` has the same
    for each mixed shape.
    """

    width: int
    curves: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    sp_from_tokens: int | None = None
    mixed_from_tokens: tuple[tuple[str, int | None], ...] = ()
    floor_us: tuple[tuple[str, int], ...] = ()
    """The least time of a step in each mode that borrows, in microseconds; others have none."""
    pace_tokens: tuple[tuple[str, int], ...] = ()
    """How large prompts make steps beside decodes, in tokens, in each mode whose loans hide."""


class StepSums(msgspec.Struct, frozen=True):
    """Sums over steps of weighted products: the input of a fit of T = A + B·t + C·c.

    t is a step's tokens in thousands, c its context in millions, y its seconds. Each step weighs
    1/y², so that errors are relative. `steps` is the number of steps.
    """

    n: float = 0.0
    t: float = 0.0
    c: float = 0.0
    y: float = 0.0
    tt: float = 0.0
    tc: float = 0.0
    cc: float = 0.0
    ty: float = 0.0
    cy: float = 0.0
    steps: float = 0.0


class ServedSteps(msgspec.Struct, frozen=True):
    """The steps that a leader served in a mode since its last report.

    `at_floor` are those that took no longer than their loans, whatever they computed: they say
    nothing about what tokens cost, but they show that the rank keeps its pace. `sums` are the rest.
    `stage_tp` is the number of parts into which each stage of a pipeline group splits the weights.
    """

    mode: Mode
    width: int
    sums: StepSums
    at_floor: StepSums = StepSums()
    stage_tp: int = 1

    @property
    def name(self) -> str:
        """The mode and width of the groups, such as `tp2` or `pp2tp2`."""
        if self.mode is Mode.PP:
            return str(Staged(self.width // self.stage_tp, self.stage_tp))
        return step_name(self.mode, self.width)
