"""`python -m worker` on CPU whose ranks run out of device memory when a test says so.

`OOM_FOLDER` names a folder; the next step of the rank whose number is the name of a file there ends
as torch ends one that finds no room, and the file is gone.
"""

import os
import sys
from pathlib import Path
from typing import Any

from worker.__main__ import FIXED_ENVIRONMENT, VLLM_ENVIRONMENT, main

# As `main` does before it imports vLLM.
os.environ.update({**VLLM_ENVIRONMENT, **os.environ, **FIXED_ENVIRONMENT})

import torch

from worker.rank_loop import RankLoop
from worker.vllm_runner import ModeRunner

FOLDER = "OOM_FOLDER"


def install() -> None:
    """Let every rank that is started from this process look before each step."""
    run, execute = RankLoop.run, ModeRunner.run
    folder = Path(os.environ[FOLDER])

    def served(self: RankLoop) -> None:
        wanted = folder / str(self._engine.spec.rank)

        def step(runner: Any, *args: Any) -> Any:
            if wanted.exists():
                wanted.unlink()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return execute(runner, *args)

        runners: Any = ModeRunner
        runners.run = step
        run(self)

    loops: Any = RankLoop
    loops.run = served


if __name__ == "__main__":
    install()
    sys.exit(main())
