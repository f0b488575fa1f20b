"""A worker of plain vLLM that takes the first device whatever its rank: NCCL 2.30 lets ranks share.

With it static tp 2 runs on one GPU, as a reference for numbers; its times mean nothing.
"""

import os
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

OPTIONS: dict[str, Any] = {
    "worker_cls": "tests.harness.vllm.shared_device.SharingWorker",
    "distributed_executor_backend": "mp",
    "disable_custom_all_reduce": True,
}
"""Of an engine whose ranks share a device: vLLM itself refuses more ranks than devices."""


class SharingWorker(Worker):  # type: ignore[misc]
    """One rank of several on the first device."""

    def init_device(self) -> None:
        """Choose the device, then do as vLLM does."""
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
        self.local_rank = 0
        super().init_device()
