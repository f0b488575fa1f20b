"""Memory that other processes can map, how it ends, and what is said when it cannot be mapped."""

import contextlib
import ctypes
import dataclasses
import gc
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from kvadaptor.transfer import driver, peers
from kvadaptor.transfer.peers import (
    CudaHandle,
    PeerMappingError,
    allocate,
    export_handle,
    open_peer,
)
from tests.harness.vllm.mover_ranks import map_with_one_blind, map_with_one_private, run_ranks

CPU = torch.device("cpu")


def test_memory_is_zero_aligned_and_takes_nothing_until_touched() -> None:
    before = psutil.Process().memory_info().rss
    raw = allocate(64 << 30, CPU)
    assert raw.dtype == torch.int8
    assert raw.shape == (64 << 30,)
    assert raw.data_ptr() % 4096 == 0
    assert not raw[-5:].any()
    raw[1 << 35] = 7
    assert psutil.Process().memory_info().rss - before < 16 << 20
    handle = export_handle(raw)
    assert isinstance(handle, peers.CpuHandle)
    assert os.fstat(handle.fd).st_blocks * 512 < 16 << 20


def open_memory() -> int:
    """Files of shared memory that this process holds; its other files come and go by themselves."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(str(link.readlink()))
    return sum(name.startswith("/memfd:") for name in names)


@pytest.fixture
def little_to_collect() -> Iterator[None]:
    """What is there by now is looked at once, and not by each collection that follows."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("little_to_collect")
def test_memory_ends_with_its_tensor() -> None:
    files = open_memory()
    for _ in range(3):
        raw = allocate(8192, CPU)
        assert open_memory() > files
        handle = export_handle(raw)
        view = raw.view(torch.bfloat16)[5:]
        del raw
        gc.collect()
        assert not view.any()
        del view
        gc.collect()
        assert open_memory() == files
    with pytest.raises(PeerMappingError, match=r"cannot be opened|not the peer's memory"):
        open_peer(handle, CPU)


def test_empty_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        allocate(0, CPU)


def lend(sender: Any) -> None:
    """A process that shows its memory until it is killed."""
    raw = allocate(1 << 20, CPU)
    raw[5] = 42
    sender.send(pickle.dumps(export_handle(raw)))
    while True:
        time.sleep(0.1)
        raw[6] += 1


def test_memory_of_a_dead_peer_stays_readable() -> None:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    lender = context.Process(target=lend, args=(sender,))
    lender.start()
    handle = pickle.loads(receiver.recv())
    mapped = open_peer(handle, CPU)
    assert mapped[5] == 42
    seen = int(mapped[6])
    deadline = time.monotonic() + 20
    while int(mapped[6]) == seen:
        assert time.monotonic() < deadline
    lender.kill()
    lender.join()
    assert lender.exitcode == -signal.SIGKILL
    assert mapped[5] == 42
    with pytest.raises(PeerMappingError, match="that process has ended"):
        open_peer(handle, CPU)


def test_nobody_else_is_taken_for_the_peer() -> None:
    handle = export_handle(allocate(4096, CPU))
    assert isinstance(handle, peers.CpuHandle)
    for changed, reason in (
        (dataclasses.replace(handle, name="aileron-kv-0"), "one PID namespace"),
        (dataclasses.replace(handle, host="elsewhere"), "another host"),
        (dataclasses.replace(handle, fd=99_999), "cannot be opened"),
        (CudaHandle(handle.host, "uuid", b"0" * 64, 0, 4096), "another kind"),
    ):
        with pytest.raises(PeerMappingError, match=reason):
            open_peer(changed, CPU)


def test_private_memory_cannot_be_offered() -> None:
    with pytest.raises(PeerMappingError, match=r"use peers\.allocate"):
        export_handle(torch.zeros(4096, dtype=torch.int8))


def test_all_ranks_get_the_same_verdict_when_one_cannot_export() -> None:
    answers = run_ranks(3, map_with_one_private, 1)
    assert len(set(answers)) == 1
    assert answers[0].startswith("rank 1: this CPU memory is private")


def test_all_ranks_get_the_same_verdict_when_one_cannot_map() -> None:
    answers = run_ranks(3, map_with_one_blind, 2)
    assert set(answers) == {("rank 2: PermissionError: [Errno 13] Permission denied", 0)}


class FakeDriver:
    """A CUDA driver whose one allocation lies at 4096."""

    def __init__(self, failing: str | None) -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuGetErrorName":
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_NO"
            elif name == self.failing:
                return 1
            elif name == "cuMemGetAddressRange_v2":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint64))[0] = 4096
            elif name == "cuIpcGetMemHandle":
                ctypes.memmove(arguments[0], b"a\0b" + bytes(61), 64)
            elif name == "cuIpcOpenMemHandle_v2":
                assert bytes(arguments[1]) == b"a\0b" + bytes(61)
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint64))[0] = 1 << 40
            return 0

        return call


def test_the_place_in_the_allocation_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_driver", lambda: FakeDriver(None))
    ipc, offset = peers._export_address(4096 + 512)
    assert offset == 512
    assert peers._open_address(ipc) == 1 << 40


@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        ("cuMemGetAddressRange_v2", "CUDA_ERROR_NO.*expandable_segments"),
        ("cuIpcGetMemHandle", "CUDA_ERROR_NO.*expandable_segments"),
        ("cuIpcOpenMemHandle_v2", "CUDA_ERROR_NO.*peer-to-peer"),
    ],
)
def test_the_driver_s_refusals_are_explained(
    failing: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_driver", lambda: FakeDriver(failing))
    with pytest.raises(PeerMappingError, match=reason):
        peers._open_address(peers._export_address(4096)[0])


def test_memory_that_is_not_torch_s_becomes_a_tensor() -> None:
    own = torch.arange(64, dtype=torch.int8)
    view = peers.tensor_at(own.data_ptr() + 8, 56, CPU)
    assert torch.equal(view, own[8:])
