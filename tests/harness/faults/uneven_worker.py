"""`python -m worker` on CPU whose ranks take the memory of whole layers from their KV, as on CUDA.

There KV gets what is left of the device, so ranks with different numbers of whole layers have
different numbers of pages. On CPU all are configured with the same memory for KV.
"""

import os
import sys
import time
from typing import Any

from worker.__main__ import FIXED_ENVIRONMENT, VLLM_ENVIRONMENT, main

# As `main` does before it imports vLLM.
os.environ.update({**VLLM_ENVIRONMENT, **os.environ, **FIXED_ENVIRONMENT})

from comm_pool.cpu.cell_memory import CellMemory, kv_name
from worker.engine import rank_engine
from worker.engine.device import kv_budget_bytes
from worker.engine.rank_engine import RankEngine

KV_PREFIX = kv_name(0).removesuffix("0")
START_LIMIT_S = 60.0


def install() -> None:
    """Make every rank that is started from this process pay for its whole layers."""
    allocate, mapped = RankEngine._allocate_kv, CellMemory.map
    module: Any = rank_engine

    def allocate_the_rest(self: RankEngine, *given: Any) -> Any:
        assert self.borrowing is not None, "a rank without loans has no whole layers to pay for."
        whole_bytes = self.borrowing.memory["whole_layers"]
        module.kv_budget_bytes = lambda *of: kv_budget_bytes(*of) - whole_bytes
        return allocate(self, *given)

    def map_as_large_as_it_is(
        self: CellMemory, name: str, num_bytes: int, *, is_own: bool = True
    ) -> Any:
        if not is_own and name.startswith(KV_PREFIX):
            num_bytes = size_of(self, name)
        return mapped(self, name, num_bytes, is_own=is_own)

    # Block directories need as many pages on all ranks, as CPU ranks have otherwise.
    module.open_directories = lambda *_, **__: ()
    engine: Any = RankEngine
    engine._allocate_kv = allocate_the_rest
    memory: Any = CellMemory
    memory.map = map_as_large_as_it_is


def size_of(memory: CellMemory, name: str) -> int:
    """How large a peer has made a piece of memory; all ranks that start make theirs."""
    deadline = time.monotonic() + START_LIMIT_S
    while not (size := os.fstat(memory._files[name]).st_size):
        assert time.monotonic() < deadline, f"nobody has made {name}"
        time.sleep(0.01)
    return size


if __name__ == "__main__":
    install()
    sys.exit(main())
