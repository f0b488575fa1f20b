"""What getting out of CUDA collectives relies on in vLLM 0.32.0's private parts."""

import inspect

import pytest

pytest.importorskip("vllm")

import torch
from vllm import _custom_ops
from vllm.distributed.device_communicators import cuda_communicator, custom_all_reduce, pynccl
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.states import RequestState

from comm_pool.cuda.collective_abort import TORCH_COLLECTIVES


def source_of(what: object) -> str:
    return inspect.getsource(what)  # type: ignore[arg-type]


def test_custom_all_reduce_keeps_its_counters_in_front_of_its_own_buffer() -> None:
    made = source_of(custom_all_reduce.CustomAllreduce.__init__)
    assert "self.meta_ptrs = self.create_shared_buffer(\n" in made
    assert "ops.meta_size() + max_size" in made
    assert "self._ptr = ops.init_custom_ar(\n            self.meta_ptrs," in made
    assert "self.disabled = True" in made
    shared = source_of(custom_all_reduce.CustomAllreduce.create_shared_buffer)
    assert "if i == rank:\n                pointers.append(pointer)" in shared, "in its own memory"
    assert inspect.signature(_custom_ops.meta_size).parameters == {}


def test_a_graph_s_addresses_are_exchanged_when_its_capture_ends() -> None:
    """For the group whose `capture` it is alone; a kernel in a graph always reads that table."""
    captured = source_of(custom_all_reduce.CustomAllreduce.capture)
    assert "finally:" in captured
    assert "self.register_graph_buffers()" in captured
    assert "ca_comm.capture()" in source_of(GroupCoordinator.graph_capture)


def test_a_group_has_the_communicators_that_are_closed_and_drained() -> None:
    made = source_of(cuda_communicator.CudaCommunicator.__init__)
    for name in ("pynccl_comm", "ca_comm", "symm_mem_comm"):
        assert f"self.{name}" in made
    group = source_of(GroupCoordinator.__init__)
    for name in ("ranks", "rank_in_group", "device", "device_communicator"):
        assert f"self.{name}" in group


def test_each_call_of_nccl_goes_through_the_library_that_is_guarded() -> None:
    """Looked up at each call, with the communicator as an argument."""
    source = source_of(pynccl.PyNcclCommunicator)
    assert "self.nccl = NCCLLibrary(" in source
    assert "self.comm: ncclComm_t = self.nccl.ncclCommInitRank(" in source
    for call in ("AllReduce", "AllGather", "Send", "Recv", "GroupStart", "GroupEnd"):
        assert f"self.nccl.nccl{call}(" in source
        assert callable(getattr(NCCLLibrary, f"nccl{call}"))
    assert "self.nccl.ncclCommAbort(self.comm)" in source_of(pynccl.PyNcclCommunicator.destroy)
    assert list(inspect.signature(NCCLLibrary.ncclCommAbort).parameters) == ["self", "comm"]
    assert "_funcs" in source_of(NCCLLibrary.ncclCommAbort)


def test_each_use_of_torch_s_group_goes_through_a_method_that_is_guarded() -> None:
    """Where vLLM's binding does not load: its NCCL is older than vLLM's, say."""
    used = [
        name
        for kind in (DeviceCommunicatorBase, cuda_communicator.CudaCommunicator)
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and "self.device_group" in source_of(method)
    ]
    # What has an underscore is called by the method that has none.
    assert {name.lstrip("_") for name in used} - {"init__"} <= set(TORCH_COLLECTIVES)
    assert "all_gather" in used
    assert callable(torch.distributed.ProcessGroup._get_backend)
    assert callable(torch._C._distributed_c10d.Backend.abort)


def test_tasks_that_were_left_in_mid_step_can_be_forgotten() -> None:
    runner = model_runner.GPUModelRunner
    assert list(inspect.signature(runner._remove_request).parameters) == ["self", "req_id"]
    assert "self.req_id_to_index" in source_of(RequestState.__init__)
    assert "self.execute_model_state: ExecuteModelState | None = None" in source_of(runner.__init__)
    # Ids that a later step names as ended may be unknown by then.
    assert "if req_idx is None:\n            return False" in source_of(runner._remove_request)
