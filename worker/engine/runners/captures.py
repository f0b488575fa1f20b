"""vLLM adapter: captures of CUDA graphs leave frozen objects frozen.

vLLM collects all garbage before and after each capture, and thaws all objects in between. A start
captures several times, and each collection after the first capture would scan everything again.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.worker.gpu import model_runner


@contextmanager
def collector_off() -> Iterator[None]:
    """Let no garbage collection run: it could unload a kernel that a capture refers to."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def keep_frozen() -> None:
    """Capture with `collector_off` in this process instead of vLLM's own context."""
    model_runner.freeze_gc_for_cudagraph_capture = collector_off
