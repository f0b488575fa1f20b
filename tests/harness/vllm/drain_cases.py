"""Cases of the kernel that drains, under Triton's interpreter.

`test_interpreted_kernels.py` runs them.
"""

import threading

import pytest
import torch

from comm_pool.cuda.signal_kernel import launch
from tests.harness.faults.emulated_reduce import Gpu

BLOCKS = 36
AHEAD = 2


def apart(peers: int) -> int:
    return -(-BLOCKS * peers * 4 // 128) * 32


@pytest.mark.parametrize("peers", [8, 16])
def test_counters_end_as_their_block_s_flag_and_as_much_more_as_is_asked(peers: int) -> None:
    words = torch.full((3 * apart(peers) + 7,), -5, dtype=torch.int32)
    flags = words[2 * apart(peers) : 2 * apart(peers) + BLOCKS]
    flags.copy_(torch.arange(BLOCKS) * 3)
    flags[7] = 2**31 - 1
    before = words.clone()
    launch(words, BLOCKS, peers, apart(peers), AHEAD, passes=2)
    wanted = (flags.to(torch.int64) + AHEAD).to(torch.int32)[:, None].expand(BLOCKS, peers)
    used = BLOCKS * peers
    for start in (0, apart(peers)):
        assert torch.equal(words[start : start + used].view(BLOCKS, peers), wanted)
        before[start : start + used] = words[start : start + used]
    assert torch.equal(words, before), "nothing else is touched"


@pytest.mark.parametrize("shows_late", [False, True])
def test_blocks_come_out_without_their_peer(shows_late: bool) -> None:
    gpus = [Gpu(place, 16, blocks=2, shows_late=shows_late) for place in range(2)]
    gpus[0].launch(gpus, collectives=4)
    assert not gpus[0].is_done(0.1)

    def drain() -> None:
        while not gpus[0].is_done(0.0):
            launch(gpus[0].words, BLOCKS, 16, apart(16), AHEAD, passes=1)

    threading.Thread(target=drain, daemon=True).start()
    assert gpus[0].is_done(60.0)
    assert gpus[0].passed == [8, 8]
