"""What the launcher does once for the ranks that it forks, and how ranks share a device."""

import gc
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.device_communicators import cuda_communicator, custom_all_reduce
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher

from coordinator.protocol.config import check_config
from tests.harness.cells.servers import MODEL
from worker.engine import device
from worker.engine.config import KV_BYTES, EngineConfigError, engine_arguments, replica_config

ROOT = Path(__file__).parents[2]
THREADS = Path("/proc/self/task")


def test_a_launcher_prepares_what_all_ranks_need_and_can_still_fork() -> None:
    """In a process of its own: threads of earlier tests come and go."""
    code = f"from {__name__} import check_launcher; check_launcher()"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2_000:]


def check_launcher() -> None:
    """Prepare as a launcher does, and check what a fork would copy."""
    base = replica_config(
        check_config(
            {"model": {"path": str(MODEL)}, "cell": {"ranks": 1, "widths": [1], "layout": "dp1"}}
        )
    )
    threads, frozen = set(THREADS.iterdir()), gc.get_freeze_count()
    device._register_platform.cache_clear()
    try:
        device.prepare_launcher(base)
        assert dispatcher._registry, "vLLM's CPU kernels are registered"
        # A fork has the forking thread alone: what others held would be locked for ever.
        assert set(THREADS.iterdir()) <= threads
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
    # A rank takes what is there.
    before = device._register_platform.cache_info().misses
    device.prepare_process(base, 0, 0)
    assert device._register_platform.cache_info().misses == before


NO_BYTES = [(), ("--kv-cache-memory-bytes", "None"), ("--kv-cache-memory-bytes", "0")]


@pytest.mark.parametrize("words", NO_BYTES)
def test_ranks_that_share_a_device_are_told_how_much_of_it_they_may_take(
    words: tuple[str, ...],
) -> None:
    cell = {"ranks": 2, "device": "cuda", "ranks_per_device": 2}
    config = check_config({"model": {"path": str(MODEL), "engine_args": words}, "cell": cell})
    with pytest.raises(EngineConfigError, match="needs --kv-cache-memory-bytes"):
        replica_config(config)


@pytest.mark.parametrize(
    ("words", "is_default"),
    [*((words, True) for words in NO_BYTES), (("--kv-cache-memory-bytes=1M",), False)],
)
def test_a_cache_of_no_size_has_the_default_one_on_cpu(
    words: tuple[str, ...], is_default: bool
) -> None:
    config = check_config({"model": {"path": str(MODEL), "engine_args": words}})
    last = engine_arguments(config)[engine_arguments(config).index(str(MODEL)) + 1 :]
    assert (last.count(KV_BYTES) > len(words) // 2) is is_default


@pytest.mark.parametrize("reach", [True, False])
def test_ranks_that_share_a_device_use_custom_all_reduce_where_all_devices_reach_each_other(
    reach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> bool:
        return False

    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "VLLM_ALLREDUCE_USE_SYMM_MEM"):
        monkeypatch.setenv(name, "not set")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach)
    monkeypatch.setattr(custom_all_reduce, "_can_p2p", refuses)
    monkeypatch.setattr(current_platform, "is_fully_connected", refuses, raising=False)
    device._share_device()
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert custom_all_reduce._can_p2p(0, 2) is reach
    assert current_platform.is_fully_connected([0, 0]) is reach
    made = inspect.getsource(custom_all_reduce.CustomAllreduce.__init__)
    assert "not _can_p2p(rank, world_size)" in made
    assert "current_platform.is_fully_connected(physical_device_ids)" in made


def test_without_peer_access_no_collective_of_vllm_maps_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("SYMM_MEM", "FLASHINFER", "FLASHINFER_PCIE_IPC")
    variables = [f"VLLM_ALLREDUCE_USE_{name}" for name in names]
    for name in ("NCCL_P2P_DISABLE", *variables):
        monkeypatch.setenv(name, "not set")
    base = replica_config(check_config({"model": {"path": str(MODEL)}}))
    base.parallel_config.disable_custom_all_reduce = False
    device._refuse_peers(base)
    assert base.parallel_config.disable_custom_all_reduce
    assert os.environ["NCCL_P2P_DISABLE"] == "1"
    # Every rank leaves out FlashInfer's.
    assert [os.environ[name] for name in variables] == ["0", "not set", "0"]
    made = inspect.getsource(cuda_communicator.CudaCommunicator.__init__)
    found = set(re.findall(r"envs\.(VLLM_ALLREDUCE_USE_\w+)", made))
    assert found == set(variables), "vLLM has another way to reduce"
