"""vLLM's workspace: what a runner's capture locks, the next runner may add to."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.worker import workspace as vllm_workspace

from worker.engine.runners import workspace
from worker.engine.runners.workspace import lock_workspace, open_workspace

KERNEL, OTHER_STREAM = ("locks", 1), ("locks", 2)


@pytest.fixture(autouse=True)
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[vllm_workspace.WorkspaceManager]:
    monkeypatch.setattr(workspace, "_captured", [])
    # Growth frees memory of an accelerator, of which there is none here.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    vllm_workspace.reset_workspace_manager()
    vllm_workspace.init_workspace_manager(torch.device("cpu"))
    yield vllm_workspace.current_workspace_manager()
    vllm_workspace.reset_workspace_manager()


def test_a_kernel_on_another_stream_gets_its_locks_after_the_first_capture(
    manager: vllm_workspace.WorkspaceManager,
) -> None:
    first = manager.get_persistent(KERNEL, (4,), torch.int32)
    lock_workspace()
    with pytest.raises(AssertionError):
        manager.get_persistent(OTHER_STREAM, (4,), torch.int32)
    open_workspace()
    manager.get_persistent(OTHER_STREAM, (4,), torch.int32)
    assert manager.get_persistent(KERNEL, (4,), torch.int32) is first
    lock_workspace()
    assert manager.is_locked()


def test_scratch_that_a_graph_may_refer_to_is_never_freed(
    manager: vllm_workspace.WorkspaceManager,
) -> None:
    (scratch,) = manager.get_simultaneous(((1024,), torch.uint8))
    address = scratch.data_ptr()
    del scratch
    lock_workspace()
    open_workspace()
    manager.get_simultaneous(((1 << 20,), torch.uint8))
    open_workspace()
    assert next(iter(workspace._captured)).data_ptr() == address
    assert len(workspace._captured) == 2, "each buffer is held once"
