"""A gateway that tells what it holds: `tests.harness.cells.counted_gateway`.

On SIGUSR2 it collects garbage, gives free memory back to the kernel, and writes the number of its
asyncio tasks and of its allocated blocks to the file in `HELD_FILE`. A block is what Python asks of
its allocator for one small object: their number says what is held, however the allocator's memory
lies. Everything else is the product's.
"""

import asyncio
import ctypes
import gc
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

HELD_FILE = "AILERON_TEST_HELD_FILE"


def _tell() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    held = {"tasks": len(asyncio.all_tasks()), "blocks": sys.getallocatedblocks()}
    file = Path(os.environ[HELD_FILE])
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(held))
    fresh.replace(file)


def main() -> None:
    """Run the gateway, watched."""
    from gateway import process

    run = process._run

    async def watched(*args: Any) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _tell)
        await run(*args)

    setattr(process, "_run", watched)  # noqa: B010 -- mypy would compare the two
    runpy.run_module("gateway", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
