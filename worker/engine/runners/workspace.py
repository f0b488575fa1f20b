"""vLLM adapter: lets each runner of a rank add to vLLM's workspace, of which a process has one.

vLLM locks the workspace after the graphs of its only runner are captured. A rank has a runner per
width, and each capture has a CUDA stream of its own, for which kernels such as Marlin's ask for
locks. Graphs that are captured refer to the scratch memory of their time, so it is never freed.
"""

import torch
from vllm.v1.worker.workspace import current_workspace_manager, lock_workspace

_captured: list[torch.Tensor] = []
"""Scratch memory that graphs may refer to."""


def open_workspace() -> None:
    """Let kernels ask for more until `lock_workspace`; what they had stays valid."""
    manager = current_workspace_manager()
    held = {id(each) for each in _captured}
    _captured.extend(
        each for each in manager._current_workspaces if each is not None and id(each) not in held
    )
    manager.unlock()


__all__ = ["lock_workspace", "open_workspace"]
