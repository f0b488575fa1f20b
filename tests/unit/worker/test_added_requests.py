"""What the runner on CUDA leaves out when it adds new tasks."""

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.states import RequestState

from worker.engine.runners.gpu import GpuModeRunner


@pytest.mark.parametrize("drafted", [0, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_only_draft_tokens_that_there_are_are_cleared(
    monkeypatch: pytest.MonkeyPatch, drafted: int, fails: bool
) -> None:
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    states = RequestState(4, 64, 64, drafted, 100, torch.device("cpu"))
    drafts = states.draft_tokens
    drafts.fill_(7)
    calls: list[str] = []

    def add(self: GpuModeRunner, _step: SchedulerOutput) -> None:
        states.add_request("a", 2, [1, 2, 3], 2, 5)
        calls.append(type(self.req_states.draft_tokens).__name__)
        if fails:
            raise ValueError("no room")

    monkeypatch.setattr(GPUModelRunner, "add_requests", add)
    runner = GpuModeRunner.__new__(GpuModeRunner)
    runner.req_states = states
    step = SchedulerOutput.make_empty()
    if fails:
        with pytest.raises(ValueError, match="no room"):
            runner.add_requests(step)
    else:
        runner.add_requests(step)
    assert calls == ["Tensor" if drafted else "_NoDrafts"]
    assert states.draft_tokens is drafts
    (row,) = states.req_id_to_index.values()
    assert int((drafts[row] == 0).sum()) == drafted
    assert int((drafts == 7).sum()) == 3 * drafted
    assert states.num_computed_tokens_np[row] == 2
