"""`python -m worker` whose ranks hold their held steps, or run out of memory, when a test says so.

`OOM_FOLDER` names a folder; see `oom_worker` for what files there do. While a file `hold` is there,
a step that was held for a switch is not computed, and who holds one says so with `held-PID`.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

# It sets the environment of ranks before it imports vLLM, as `main` does.
from tests.harness.faults import oom_worker
from worker.__main__ import main
from worker.rank.steps import DeferredStep

HOLD, HELD = "hold", "held"
HOLD_LIMIT_S = 20.0
"""A test that fails does not keep its ranks for ever."""


def install() -> None:
    """Let every rank that is started from this process look before it computes what it held."""
    compute = DeferredStep.get_output
    folder = Path(os.environ[oom_worker.FOLDER])

    def late(self: DeferredStep) -> Any:
        until_s = time.monotonic() + HOLD_LIMIT_S
        while (folder / HOLD).exists() and time.monotonic() < until_s:
            (folder / f"{HELD}-{os.getpid()}").touch()
            time.sleep(0.005)
        return compute(self)

    step: Any = DeferredStep
    step.get_output = late


if __name__ == "__main__":
    oom_worker.install()
    install()
    sys.exit(main())
