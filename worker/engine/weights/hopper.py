"""The GPUs that our products of fp8 weights are made for, and tuned on."""

import torch

from worker.engine.config import HOPPER


def is_hopper(device: torch.device) -> bool:
    """Return whether a device has the compute capability of an H100 or H200."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device)[0] == HOPPER)
