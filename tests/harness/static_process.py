"""Runs one of the reference programs over plain vLLM in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.servers import ROOT

SHARED_MEMORY = Path("/dev/shm")
TIME_LIMIT_S = 300


def run_static(module: str, spec: dict[str, Any], out: Path) -> None:
    """Run `python -m MODULE SPEC.json OUT`; plain vLLM leaves nothing behind here."""
    given = out.with_suffix(".spec.json")
    given.write_text(json.dumps(spec))
    before = set(SHARED_MEMORY.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", module, str(given), str(out)],
        cwd=ROOT,
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    for segment in set(SHARED_MEMORY.glob("vllm_dist_*")) - before:
        segment.unlink(missing_ok=True)  # Plain vLLM leaves its own behind.
    assert done.returncode == 0, done.stderr[-3000:]
