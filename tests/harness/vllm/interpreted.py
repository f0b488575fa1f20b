"""Runs cases of Triton kernels in Triton's interpreter, which is chosen once per process."""

import os
import subprocess
import sys
from pathlib import Path

HARNESS = Path(__file__).resolve().parent
ROOT = HARNESS.parents[2]


def run_cases(cases: Path, fewest: int) -> None:
    """Run a file of cases with pytest; `fewest` must pass, as an empty run proves nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", str(cases)],
        cwd=ROOT,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = [word for word in done.stdout.splitlines()[-1].split() if word.isdigit()]
    assert int(passed[0]) >= fewest, done.stdout[-500:]
