"""What torch's allocator is told while weights are loaded, and what start-up says of memory."""

from types import SimpleNamespace
from typing import Protocol, cast

import pytest

pytest.importorskip("vllm")

import torch
from structlog.testing import capture_logs
from vllm.config import VllmConfig
from vllm.device_allocator.alloc_conf import set_alloc_conf

from worker.engine import device
from worker.engine.device import MAX_SPLIT_MIB, MemoryNotes, kv_budget_bytes, whole_blocks

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
LIMIT = f"max_split_size_mb:{MAX_SPLIT_MIB}"


class Told(Protocol):
    """See the fixture."""

    def __call__(self, given: str, backend: str = "native") -> list[str]: ...


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Give an allocator that was configured so; returns the list of what it is told from then on.

    Torch's own parser reads each text, on CPU too, and raises on what it does not know.
    """

    def configured(given: str, backend: str = "native") -> list[str]:
        texts: list[str] = []

        def note(text: str) -> None:
            set_alloc_conf(text)
            texts.append(text)

        monkeypatch.setattr(device, "current_alloc_conf", lambda: given)
        monkeypatch.setattr(device, "set_alloc_conf", note)
        monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: backend)
        return texts

    return configured


def test_large_blocks_are_whole_inside_and_split_as_before_outside(told: Told) -> None:
    texts = told("")
    with whole_blocks(CUDA):
        assert texts == [LIMIT]
    assert texts == [LIMIT, ""]


@pytest.mark.parametrize(
    "given",
    [
        "garbage_collection_threshold:0.8",
        "garbage_collection_threshold:0.8, ",
        "roundup_power2_divisions:[256:1,>:8],max_split_size_mb:512",
    ],
)
def test_what_the_user_has_set_stays(told: Told, given: str) -> None:
    texts = told(given)
    with whole_blocks(CUDA):
        pass
    # The last of two values for one option counts.
    assert texts == [f"{given.strip().rstrip(',')},{LIMIT}", given]


def test_a_model_that_cannot_be_loaded_leaves_the_allocator_as_it_was(told: Told) -> None:
    texts = told("garbage_collection_threshold:0.8")
    with pytest.raises(ValueError, match="unknown"), whole_blocks(CUDA):
        raise ValueError("unknown model")
    assert texts[-1] == "garbage_collection_threshold:0.8"


def test_other_allocators_are_left_alone(told: Told) -> None:
    texts = told("", backend="cudaMallocAsync")
    with whole_blocks(CUDA):
        pass
    with whole_blocks(CPU):
        pass
    assert texts == []


def test_stages_say_who_holds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([500, 75_000])
    monkeypatch.setattr(device, "used_bytes", lambda _: next(used))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 72_000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 74_000)
    notes = MemoryNotes(CUDA)
    with capture_logs() as logs:
        notes.note("weights")
    assert notes.context == 500
    assert logs == [
        {
            "event": "device_memory",
            "log_level": "info",
            "stage": "weights",
            "taken": 74_500,
            "used": 75_000,
            "allocated": 72_000,
            "reserved": 74_000,
            "outside": 1_000,
        }
    ]


def test_a_cpu_rank_has_no_device_memory_to_tell_of() -> None:
    notes = MemoryNotes(CPU)
    with capture_logs() as logs:
        notes.note("weights")
    assert logs == [] and notes.rest(0) == 0


GIB = 1 << 30


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        # 0.5 GiB was there before: the share of 8 GiB is left but for the 5 GiB that were taken.
        (5.5, 8 - 5 - 1),
        # Somebody else's memory was there before: what is free bounds it.
        (9.75, 0.25 - 1),
    ],
)
def test_kv_gets_its_share_of_the_device_without_what_was_there_before(
    monkeypatch: pytest.MonkeyPatch, used: float, expected: float
) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.8)
    )
    used_bytes, total = int(used * GIB), 10 * GIB
    before = used_bytes - 5 * GIB
    monkeypatch.setattr(device, "used_bytes", lambda _: used_bytes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - used_bytes, total))
    assert kv_budget_bytes(cast(VllmConfig, config), CUDA, before, GIB) == int(expected * GIB)
