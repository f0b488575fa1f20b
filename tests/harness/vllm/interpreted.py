"""Runs cases of Triton kernels in Triton's interpreter, which is chosen once per process."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

HARNESS = Path(__file__).resolve().parent
ROOT = HARNESS.parents[2]
LIMIT_S = 560


def run_cases(*files: str, marks: str) -> Counter[str]:
    """Run files of cases with pytest, all in one process, as importing vLLM takes seconds.

    Returns:
        How many cases of each file have passed; none has failed.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-rp", "-m", marks),
            *("-p", "asyncio", "-p", "timeout"),
            *(str(HARNESS / file) for file in files),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TRITON_INTERPRET": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = [line for line in done.stdout.splitlines() if line.startswith("PASSED ")]
    return Counter(Path(line.split()[1].partition("::")[0]).name for line in passed)
