"""vLLM adapter: what differs between CPU and CUDA ranks: process set-up, runner, KV memory."""

import functools
import gc
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import structlog
import torch
import vllm.ir
from torch import nn
from vllm.config import VllmConfig
from vllm.device_allocator.alloc_conf import current_alloc_conf, set_alloc_conf
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.torch_utils import set_random_seed

from comm_pool.layout import StepMode
from comm_pool.stages.links import StageLinks

log = structlog.get_logger()

NCCL_SETTINGS = {"NCCL_BUFFSIZE": 2 << 20, "NCCL_LL128_BUFFSIZE": 4915200 // 4}
"""Bytes per channel and peer of NCCL's two large protocols: half and a quarter of its defaults.

Custom all-reduce takes the small messages, so LL128 has little to do. Fewer channels
(NCCL_MAX_CTAS=16) would save more, but all-reduces of a prefill would take 9 to 12 % longer.
"""

TORCH_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Settings that disable torch's own watchdog; ranks have one.

torch's would kill a process whose communicators are aborted, or which misses a lost peer's store.
After an error of the device it would end the process before that withdraws what others may read.
"""

MAX_SPLIT_MIB = 20
"""Free blocks from this size on are used whole during loading; it is torch's minimum."""

WHOLE_SHARE = 0.5
"""Part of the memory left beside the parts that whole layers may take; the rest is for KV."""


def prepare_launcher(base: VllmConfig) -> None:
    """Do once, before ranks are forked, what each of them would do alike.

    On CUDA it imports nothing that might open a device: no process could use it after a fork.
    """
    if current_platform.is_cpu():
        import vllm.model_executor.layers.quantization.online.base
        import vllm.v1.worker.cpu_model_runner  # noqa: F401 -- each takes a second

        _register_platform()
        get_model_architecture(base.model_config)
    freeze_objects()  # Ranks need not copy their pages, either.


def freeze_objects() -> None:
    """Let later garbage collections scan none of the objects of now, which live for good.

    A start collects a dozen times, to measure memory; imports and a model's modules alone would
    take 0.3 s each time.
    """
    gc.collect()
    gc.freeze()


@functools.cache
def _register_platform() -> None:
    load_general_plugins()
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def prepare_process(
    base: VllmConfig,
    rank: int,
    threads: int,
    ranks_per_device: int = 1,
    peer_access: bool = True,
) -> torch.device:
    """Do what vLLM's worker wrapper does before it builds a worker; return the device.

    Without `peer_access`, no collective maps the memory of another device.
    """
    is_cpu = current_platform.is_cpu()
    if is_cpu:
        from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

        _set_torch_accelerator_to_noop()  # vLLM's loader would empty an accelerator's cache.
    _register_platform()
    # Without these two, vLLM's norms run as single torch operations: +1 ms per step on an H200.
    base.kernel_config.ir_op_priority.set_default()
    vllm.ir.set_default_torch_wrap(base.compilation_config.ir_enable_torch_wrap)
    base.parallel_config.rank = rank
    device = torch.device("cpu") if is_cpu else torch.device("cuda", rank // ranks_per_device)
    if is_cpu:
        base.parallel_config.disable_custom_all_reduce = True
    else:
        from vllm.v1.worker.workspace import init_workspace_manager

        for name, value in {**NCCL_SETTINGS, **TORCH_SETTINGS}.items():
            os.environ.setdefault(name, str(value))
        if not peer_access:
            _refuse_peers(base)
        if ranks_per_device > 1:
            _share_device()
        # FlashInfer has one workspace per process, but a rank has several groups.
        os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"

        torch.cuda.set_device(device)
        init_workspace_manager(device)
        # The launcher cannot import it, and its objects are for good, as the launcher's are.
        from worker.engine.runners import gpu  # noqa: F401

        gc.freeze()
    if threads:
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    set_random_seed(base.model_config.seed)
    return device


def _refuse_peers(base: VllmConfig) -> None:
    """Let no collective map the memory of peers, which NCCL's variable alone does not stop."""
    base.parallel_config.disable_custom_all_reduce = True
    os.environ["NCCL_P2P_DISABLE"] = "1"
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
    os.environ["VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"] = "0"


def _share_device() -> None:
    """Let ranks of one device communicate; NCCL before 2.30 fails with `Duplicate GPU`."""
    from vllm.distributed.device_communicators import custom_all_reduce

    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
    devices = range(torch.cuda.device_count())
    if all(torch.cuda.can_device_access_peer(*pair) for pair in itertools.permutations(devices, 2)):
        # vLLM expects one device per member, but there are fewer.
        custom_all_reduce._can_p2p = _reaches
        current_platform.is_fully_connected = _reaches


def _reaches(*_: object) -> bool:
    return True


def make_runner(
    config: VllmConfig,
    device: torch.device,
    trees: Mapping[StepMode, nn.Module],
    borrowing: Collection[StepMode] = (),
    links: StageLinks | None = None,
) -> Any:
    """Return the runner of one width: model runner V2 on CUDA, V1 on CPU, with one interface.

    Steps in the modes `borrowing` read weights from peers. `links` are those of a pipeline stage.
    """
    if device.type == "cuda":
        from worker.engine.runners.gpu import GpuModeRunner

        return GpuModeRunner(config, device, trees, borrowing, links)
    from worker.engine.runners.cpu import ModeRunner

    return ModeRunner(config, device, trees, links)


def used_bytes(device: torch.device) -> int:
    """Return the device memory in use, by this process or others; 0 on CPU."""
    if device.type == "cpu":
        return 0
    gc.collect()  # Garbage from loading would count as used.
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


@contextmanager
def whole_blocks(device: torch.device) -> Iterator[None]:
    """Never split large free blocks of torch's cache; vLLM's worker loads weights likewise.

    With quantization during loading, each layer frees its bf16 weights. A later weight placed
    inside such a block would pin the whole block: 1.39 GB for the fp8 weights of a 70B model, which
    KV would lack.
    """
    if device.type == "cpu" or torch.cuda.memory.get_allocator_backend() != "native":
        yield
        return
    given = current_alloc_conf()
    # Torch resets options that the text does not name; the last of two values for one counts.
    named = [given.strip().rstrip(",")] if given.strip() else []
    set_alloc_conf(",".join([*named, f"max_split_size_mb:{MAX_SPLIT_MIB}"]))
    try:
        yield
    finally:
        set_alloc_conf(given)


class MemoryNotes:
    """Records the device memory that each start-up stage takes, so that all of it is named."""

    def __init__(self, device: torch.device, predecessor_bytes: int = 0) -> None:
        """`predecessor_bytes` are in use already, for memory that the rank takes over."""
        self._device = device
        self._used = used_bytes(device)
        self.context = max(0, self._used - predecessor_bytes)
        """Bytes of the driver and other processes, before the rank allocates anything."""

    def note(self, stage: str) -> None:
        """Log the bytes that this stage has taken, and who holds the memory now in use.

        `reserved` beyond `allocated` are free parts of blocks that torch cannot give back;
        `outside` belongs to the driver, its libraries or other processes.
        """
        before, self._used = self._used, used_bytes(self._device)
        if self._device.type != "cuda":
            return
        reserved = torch.cuda.memory_reserved(self._device)
        log.info(
            "device_memory",
            stage=stage,
            taken=self._used - before,
            used=self._used,
            allocated=torch.cuda.memory_allocated(self._device),
            reserved=reserved,
            outside=self._used - reserved,
        )

    def rest(self, named: int) -> int:
        """Return the bytes in use beyond the context and the named ones."""
        return max(0, used_bytes(self._device) - self.context - named)


def activation_bytes(device: torch.device, profile: Callable[[], None]) -> int:
    """Return the peak allocation of one forward pass of the largest batch; 0 on CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    profile()
    return int(torch.cuda.max_memory_allocated(device)) - before


def kv_budget_bytes(config: VllmConfig, device: torch.device, before: int, reserved: int) -> int:
    """Return the memory for KV: the configured size, else the rest of the device.

    `before` bytes were in use before the rank allocated anything; as in vLLM, they do not count
    against the configured share. `reserved` bytes stay free for activations and for graphs captured
    later.
    """
    given = config.cache_config.kv_cache_memory_bytes
    if given is not None or device.type == "cpu":
        assert given is not None, "the KV memory of CPU ranks is set by engine_arguments."
        return int(given)
    return free_bytes(config, device, before) - reserved


def free_bytes(config: VllmConfig, device: torch.device, before: int) -> int:
    """Return how much more of a CUDA device the rank may use; `before` is as above."""
    used = used_bytes(device)
    free, total = torch.cuda.mem_get_info(device)
    asked = int(config.cache_config.gpu_memory_utilization * total)
    return min(asked - (used - before), free)


def room_for_whole(config: VllmConfig, device: torch.device) -> int | None:
    """Return the bytes that whole layers may take once the parts are loaded; None on CPU."""
    given = config.cache_config.kv_cache_memory_bytes
    if device.type == "cpu":
        return None
    free = free_bytes(config, device, before=0)
    return max(0, min(int(WHOLE_SHARE * free), free - (given or 0)))
