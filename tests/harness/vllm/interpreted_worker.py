"""`python -m worker` whose ranks compute quantized weights in plain torch, on any processor."""

import os
import sys

from worker.__main__ import FIXED_ENVIRONMENT, VLLM_ENVIRONMENT, main

# As `main` does before it imports vLLM.
os.environ.update({**VLLM_ENVIRONMENT, **os.environ, **FIXED_ENVIRONMENT})

from tests.harness.vllm import cpu_kernels

if __name__ == "__main__":
    cpu_kernels.install()
    sys.exit(main())
