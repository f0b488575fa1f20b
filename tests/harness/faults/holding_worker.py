"""`python -m worker` whose held steps wait for a while, so that ranks can be killed meanwhile."""

import os
import sys
import time
from typing import Any

from worker.__main__ import FIXED_ENVIRONMENT, VLLM_ENVIRONMENT, main

# As `main` does before it imports vLLM.
os.environ.update({**VLLM_ENVIRONMENT, **os.environ, **FIXED_ENVIRONMENT})

from worker.held_step import HeldStep

WAIT_S = 0.5


def install() -> None:
    """Let every rank that is started from this process wait before it computes what it held."""
    compute = HeldStep.get_output

    def late(self: HeldStep) -> Any:
        time.sleep(WAIT_S)
        return compute(self)

    step: Any = HeldStep
    step.get_output = late


if __name__ == "__main__":
    install()
    sys.exit(main())
