"""Token ids of new tasks that are written to their rows at once."""

import inspect
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBuffer
from vllm.v1.worker.gpu.states import RequestState

from worker.engine.scheduling.token_rows import take_arrays


class Buffer:
    """Memory of the host that the device reads, as `UvaBuffer` is with a device."""

    def __init__(self) -> None:
        self.cpu = torch.zeros((3, 8), dtype=torch.int32)
        self.np = self.cpu.numpy()

    def uva(self) -> torch.Tensor:
        return self.cpu


class Staged:
    def __init__(self, buffer: Buffer | None) -> None:
        if buffer is not None:
            self._uva_buf = buffer
        self.gpu = buffer.uva() if buffer is not None else torch.zeros(3, 8)
        self.staged: list[tuple[int, int, list[int]]] = []

    def stage_write(self, index: int, start: int, ids: list[int]) -> None:
        self.staged.append((index, start, ids))


def test_arrays_are_written_and_lists_are_staged() -> None:
    buffer = Buffer()
    tokens: Any = Staged(buffer)
    assert take_arrays(tokens)
    tokens.stage_write(1, 2, np.array([7, 8, 9], dtype=np.int32))
    tokens.stage_write(0, 0, [1, 2])
    tokens.stage_write(2, 0, np.zeros(0, dtype=np.int32))
    assert tokens.staged == [(0, 0, [1, 2])]
    assert buffer.cpu.tolist() == [[0] * 8, [0, 0, 7, 8, 9, 0, 0, 0], [0] * 8]


def test_rows_that_the_device_does_not_read_from_the_host_take_no_arrays() -> None:
    assert not take_arrays(Staged(None))
    copied: Any = Staged(Buffer())
    copied.gpu = torch.zeros((3, 8), dtype=torch.int32)
    assert not take_arrays(copied)


def test_vllm_writes_rows_as_we_expect() -> None:
    source = inspect.getsource(StagedWriteTensor.__init__)
    assert "self._uva_buf = UvaBuffer(size, dtype)" in source
    assert "self.gpu = self._uva_buf.uva()" in source
    assert "self.np = self.cpu.numpy()" in inspect.getsource(UvaBuffer.__init__)
    added = inspect.getsource(RequestState.add_request)
    assert "len(all_token_ids)" in added
    assert added.count("all_token_ids") == 4, "nothing else is done with them"
    assert "self.all_token_ids.stage_write(req_idx, 0, all_token_ids)" in added
