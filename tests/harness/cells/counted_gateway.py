"""A gateway that tells how many asyncio tasks it has: `tests.harness.cells.counted_gateway`.

On SIGUSR2 it writes their number to the file in `TASKS_FILE`. Everything else is the product's.
"""

import asyncio
import os
import runpy
import signal
from pathlib import Path
from typing import Any

from gateway import process

TASKS_FILE = "AILERON_TEST_TASKS_FILE"


def _tell() -> None:
    file = Path(os.environ[TASKS_FILE])
    fresh = file.with_suffix(".new")
    fresh.write_text(str(len(asyncio.all_tasks())))
    fresh.replace(file)


def main() -> None:
    """Run the gateway, watched."""
    run = process._run

    async def watched(*args: Any) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _tell)
        await run(*args)

    setattr(process, "_run", watched)  # noqa: B010 -- mypy would compare the two
    runpy.run_module("gateway", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
