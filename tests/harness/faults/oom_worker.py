"""`python -m worker` whose ranks run out of device memory when a test says so.

`OOM_FOLDER` names a folder; with a file `step-R` there the next step of rank R ends as torch ends
one that finds no room, and with `copies-R` its next copies of a move do; the file is gone then.
"""

import os
import sys
from pathlib import Path
from typing import Any

from worker.__main__ import FIXED_ENVIRONMENT, VLLM_ENVIRONMENT, main

# As `main` does before it imports vLLM.
os.environ.update({**VLLM_ENVIRONMENT, **os.environ, **FIXED_ENVIRONMENT})

import torch

from kvadaptor.transfer.movers import PeerMover
from worker.rank.loop import RankLoop

FOLDER = "OOM_FOLDER"
STEP, COPIES = "step", "copies"
TOO_MUCH_BYTES = 1 << 50


def _ask_too_much() -> None:
    """On CUDA torch itself has to refuse it."""
    if torch.cuda.is_available():
        torch.empty(TOO_MUCH_BYTES, dtype=torch.int8, device="cuda")
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def _runners() -> Any:
    if torch.cuda.is_available():
        from worker.engine.runners.gpu import GpuModeRunner

        return GpuModeRunner
    from worker.engine.runners.cpu import ModeRunner

    return ModeRunner


def install() -> None:
    """Let every rank that is started from this process look before each step and each copy."""
    run, start = RankLoop.run, PeerMover.start
    folder = Path(os.environ[FOLDER])

    def served(self: RankLoop) -> None:
        rank, runners = self.core.engine.spec.rank, _runners()
        execute = runners.run

        def find_room(what: str) -> None:
            if (wanted := folder / f"{what}-{rank}").exists():
                wanted.unlink()
                _ask_too_much()

        def step(runner: Any, *args: Any) -> Any:
            find_room(STEP)
            return execute(runner, *args)

        def copy(mover: Any, *args: Any) -> Any:
            find_room(COPIES)
            return start(mover, *args)

        runners.run = step
        movers: Any = PeerMover
        movers.start = copy
        run(self)

    loops: Any = RankLoop
    loops.run = served


if __name__ == "__main__":
    install()
    sys.exit(main())
