"""Copies between a rank's slots and host pages: the same bytes by arrays and by the copy engine."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvadaptor.geometry import PageGeometry, Slots, Split
from kvadaptor.host.page_copies import PageCopier, PageCopies
from kvadaptor.transfer import boxes
from kvadaptor.transfer.boxes import BOX_FIELDS, DeviceBoxCopier, HostCopyError

GEOMETRY = PageGeometry(
    num_layers=3, num_kv_heads=4, head_dim_k=2, head_dim_v=2, dtype_bytes=2, tokens_per_slot=4
)
PAGES, HOST_PAGES = 5, 6
DP, TP2, TP4, PP3 = (
    *(GEOMETRY.slots(Split(1, tp)) for tp in (1, 2, 4)),
    Slots(rows=3, columns=2, layers=1, heads=2),
)


class Stream:
    """Stands for a stream of CUDA: nothing is in flight."""

    cuda_stream = 5

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take a device and a priority."""

    def wait_stream(self, _: "Stream") -> None:
        """Nothing is in flight."""

    def wait_event(self, _: "Event") -> None:
        """Nothing is in flight."""


class Event:
    def record(self, _: Stream) -> None:
        """All that was launched is over."""

    def query(self) -> bool:
        return True


def copy_boxes(name: str, count: Any, listed: Any, *_: Any) -> None:
    """Do what the driver does, between any addresses of this process."""
    assert name == "cuMemcpy3DBatchAsync"
    raw = ctypes.string_at(listed.value, count.value * BOX_FIELDS.itemsize)
    for box in np.frombuffer(raw, BOX_FIELDS):
        assert (box["source_kind"], box["target_kind"], box["rows"]) == (1, 1, 1)
        for layer in range(int(box["layers"])):
            source, target = (
                int(box[f"{side}_address"])
                + layer * int(box[f"{side}_pitch"]) * int(box[f"{side}_height"])
                for side in ("source", "target")
            )
            ctypes.memmove(target, source, int(box["run"]))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(boxes, "call_driver", copy_boxes)


class Memory:
    """A rank's KV memory and host pages, full of random bytes."""

    def __init__(self) -> None:
        draw = np.random.default_rng(5)
        size = GEOMETRY.page_bytes
        self.kv = torch.from_numpy(draw.integers(-128, 127, PAGES * size, dtype=np.int8))
        self.host = draw.integers(0, 255, HOST_PAGES * size, dtype=np.uint8)

    def copier(self, *, loads: bool, on_device: bool = False) -> PageCopier:
        made = PageCopier(self.host.ctypes.data, self.kv, GEOMETRY, loads=loads)
        if on_device:
            made._on_device, made._copier = True, DeviceBoxCopier(torch.device("cuda", 0))
        return made


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize(
    "copies",
    [
        PageCopies(DP, 0, [3, 1], [0, 5]),
        PageCopies(TP2, 1, [3, 9, 0], [4, 2, 1]),
        PageCopies(TP4, 2, range(16, 20), [5, 3, 2, 0]),
        PageCopies(PP3, 5, [3, 29], [4, 1]),
    ],
)
def test_the_copy_engine_moves_the_bytes_that_arrays_do(*, loads: bool, copies: PageCopies) -> None:
    one, other = Memory(), Memory()
    assert one.copier(loads=loads).launch(copies).is_over()
    copying = other.copier(loads=loads, on_device=True).launch(copies)
    assert copying.is_over()
    copying.order()
    assert torch.equal(one.kv, other.kv)
    assert np.array_equal(one.host, other.host)
    changed = torch.equal(one.kv, Memory().kv), np.array_equal(one.host, Memory().host)
    assert changed == (not loads, loads)


def test_a_share_is_the_same_heads_in_every_width() -> None:
    """What dp has stored is what each member of a wide group loads, head by head."""
    memory = Memory()
    memory.copier(loads=False).launch(PageCopies(DP, 0, [2], [3]))
    size = GEOMETRY.layer_page_bytes
    wanted = memory.kv.numpy().view(np.uint8).reshape(GEOMETRY.num_layers, -1, size)[:, 2].copy()
    halves = []
    for share in range(2):
        memory.copier(loads=True).launch(PageCopies(TP2, share, [8], [3]))
        own = memory.kv.numpy().view(np.uint8).reshape(GEOMETRY.num_layers, -1, size // 2)
        halves.append(own[:, 8].copy())
    assert np.array_equal(np.concatenate(halves, axis=1), wanted)


@pytest.mark.usefixtures("device")
def test_the_driver_s_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse: Callable[..., str] = lambda *_: "CUDA_ERROR_NO"  # noqa: E731
    monkeypatch.setattr(boxes, "call_driver", refuse)
    with pytest.raises(HostCopyError, match=r"CUDA_ERROR_NO.*--host-kv 0"):
        Memory().copier(loads=True, on_device=True).launch(PageCopies(DP, 0, [1], [1]))
