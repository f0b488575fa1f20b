"""Runs one of the reference programs over plain vLLM in a process of its own."""

import json
import os
from pathlib import Path
from typing import Any

from tests.harness.cells.warm import run_module

SHARED_MEMORY = Path("/dev/shm")
TIME_LIMIT_S = 300


def run_static(module: str, spec: dict[str, Any], out: Path, *, on_cuda: bool = False) -> None:
    """Run `python -m MODULE SPEC.json OUT`; plain vLLM leaves nothing behind here."""
    given = out.with_suffix(".spec.json")
    given.write_text(json.dumps(spec))
    before = set(SHARED_MEMORY.iterdir())
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if not on_cuda:
        # Else the engine is a process of its own, and a worker one below that: both import anew.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    kind = None if on_cuda else "plain"
    code, said = run_module(kind, module, [str(given), str(out)], env=env, limit_s=TIME_LIMIT_S)
    for segment in set(SHARED_MEMORY.glob("vllm_dist_*")) - before:
        segment.unlink(missing_ok=True)  # Plain vLLM leaves its own behind.
    assert code == 0, said[-3000:]
