"""Writes into the weights of a running rank, as a broken memory does: nobody there is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from tests.harness.cells.servers import MODEL
from worker.engine.weights.lenders import is_ending

MEMORY = "/memfd:aileron-rest-"
"""Where ranks keep their weights."""


def weight(name: str) -> torch.Tensor:
    """One of the demo model's tensors, as ranks in fp32 hold it."""
    (file,) = MODEL.glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(name).float()
    return tensor


@contextmanager
def spoiled(pid: int, tensor: torch.Tensor) -> Iterator[int]:
    """For the length of the block, turn the signs of a tensor wherever a process has its bytes.

    Yields at how many places; OSError if the process may not be written to.
    """
    wanted = tensor.numpy().tobytes()
    places = _places(pid, wanted)
    _write(pid, places, (-tensor).numpy().tobytes())
    try:
        yield len(places)
    finally:
        # Its end is known before it is over.
        if not is_ending(pid):
            _write(pid, places, wanted)


def _places(pid: int, wanted: bytes) -> list[int]:
    """Addresses in the process' own memory and its weights in the cell's; files are left alone."""
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, access, _, _, inode, *_ = line.split()
            first, last = (int(each, 16) for each in span.split("-"))
            if not access.startswith("rw") or (inode != "0" and MEMORY not in line):
                continue
            memory.seek(first)
            try:
                held = memory.read(last - first)
            except OSError:
                continue
            at = held.find(wanted)
            while at >= 0:
                found.append(first + at)
                at = held.find(wanted, at + 1)
    return found


def _write(pid: int, places: list[int], what: bytes) -> None:
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for place in places:
            memory.seek(place)
            memory.write(what)
