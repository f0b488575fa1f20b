"""`python -m worker` whose moves cut the copy kernel's launches up in several ways, by turns.

`COPY_SHAPES` lists them as tile_words/programs/warps with commas between; each serves for a switch
and the one back. `PROFILE_OUT` as in `tests.bench.profiled_worker`. Used by
`tests.bench.copy_shapes`.
"""

import os
import sys
from pathlib import Path
from typing import Any

from tests.bench import profiled_worker
from worker.__main__ import main


def install(wanted: str) -> None:
    """Let all copies of a rank's moves have these shapes."""
    from kvadaptor.transfer.copy_kernel import Shape
    from kvadaptor.transfer.unit_copy import KernelCopier
    from worker.rank.migration.copy_rounds import CopyRounds

    shapes = [Shape(*map(int, each.split("/"))) for each in wanted.split(",")]
    warm, carry_out = KernelCopier.warm, CopyRounds.carry_out
    moves = 0

    def warm_all(self: KernelCopier, *args: Any) -> None:
        for self._shape in shapes:
            warm(self, *args)

    def with_shape(self: CopyRounds, *args: Any) -> None:
        nonlocal moves
        copier = getattr(self._engine.mover, "_copier", None)
        if isinstance(copier, KernelCopier):
            copier._shape = shapes[moves // 2 % len(shapes)]
        moves += 1
        carry_out(self, *args)

    KernelCopier.warm = warm_all  # type: ignore[method-assign, assignment]
    CopyRounds.carry_out = with_shape  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    install(os.environ["COPY_SHAPES"])
    profiled_worker.install(Path(os.environ["PROFILE_OUT"]), "events")
    sys.exit(main())
