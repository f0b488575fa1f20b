"""A CPU rank's own KV memory when it takes its predecessor's place."""

import os

import numpy as np
import pytest

pytest.importorskip("vllm")

from comm_pool.cpu.cell_memory import cell_memory, kv_name
from comm_pool.layout import Rank
from kvadaptor.geometry import PageGeometry, Split
from worker.engine.lost_kv import open_directories
from worker.engine.peers import take_kv

GEOMETRY = PageGeometry(2, 4, 32, 32, 2, 16)
"""16 KiB of a page for each layer."""
PAGES = 64
NUM_BYTES = PAGES * GEOMETRY.page_bytes
RANK = Rank(0)


@pytest.mark.parametrize("inherited", [[], [3], [1, 2, 63]])
def test_all_pages_but_inherited_ones_are_freed(inherited: list[int]) -> None:
    memory = cell_memory(1, (1,), ())
    places = memory, RANK, 1, PAGES, GEOMETRY, {Split(1, 1)}
    (before,) = open_directories(*places)
    before.begin(5, [7])
    before.keep(RANK, 5, None)
    before.fill(inherited, [bytes([page]) * 32 for page in inherited])
    mapped = memory.map(kv_name(RANK), NUM_BYTES)
    mapped[:] = b"\1" * NUM_BYTES
    own = take_kv(memory, RANK, GEOMETRY, open_directories(*places), NUM_BYTES)
    blocks = os.fstat(memory._files[kv_name(RANK)]).st_blocks  # Reading takes room, too.
    pages = own.numpy().reshape(GEOMETRY.num_layers, PAGES, -1)
    assert (pages[:, inherited] == 1).all()
    assert not np.delete(pages, inherited, axis=1).any()
    assert blocks * 512 == len(inherited) * GEOMETRY.page_bytes
    memory.close()
