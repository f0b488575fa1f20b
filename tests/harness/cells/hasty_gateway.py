"""A gateway whose patience is what the environment says: `tests.harness.cells.hasty_gateway`.

`AILERON_TEST_DRAIN_S` is how long streams may go on once it is told to end, `AILERON_TEST_STALL_S`
how long a client may stop reading. Everything else is the product's.
"""

import os
import runpy

from gateway import answer, process

DRAIN_ENV, STALL_ENV = "AILERON_TEST_DRAIN_S", "AILERON_TEST_STALL_S"


def main() -> None:
    """Run the gateway."""
    process.DRAIN_S = float(os.environ.get(DRAIN_ENV, process.DRAIN_S))
    answer.SEND_STALL_S = float(os.environ.get(STALL_ENV, answer.SEND_STALL_S))
    runpy.run_module("gateway", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
