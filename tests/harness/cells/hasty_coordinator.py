"""A coordinator that waits a fraction as long: `tests.harness.cells.hasty_coordinator`.

The product restores a layout when it could have been for 3 s, and leaves a rank that was late, or
had no room, out for 5 s. Everything else is the product's.
"""

import functools
import runpy

from coordinator.model import settings
from coordinator.model.settings import OutlierSettings

SETTLED_MS = 300
OUT_MS = 1_500
"""Long enough for tests to see it on a busy machine."""


def main() -> None:
    """Run the coordinator."""
    settings.SETTLED_MS = SETTLED_MS
    hasty = functools.partial(OutlierSettings, late_out_ms=(OUT_MS,))
    setattr(settings, "OutlierSettings", hasty)  # noqa: B010 -- mypy would compare the two
    runpy.run_module("coordinator", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
