"""The fused RoPE under Triton's interpreter, which must be chosen before triton's first import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

ROOT = Path(__file__).resolve().parents[3]
CASES = Path(__file__).with_name("rope_cases.py")
FEWEST = 40
"""Cases that must have passed: an empty run proves nothing."""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_cases_pass_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", str(CASES)],
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
    assert int(passed[0]) >= FEWEST, done.stdout[-500:]
