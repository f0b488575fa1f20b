"""The Triton kernel that lets blocks of a custom all-reduce through their barriers."""

from typing import Any

import triton
import triton.language as tl

WARPS = 4


# A running kernel polls and raises these words. They are read past the L1 cache and written by
# atomics, which act in L2: plain accesses of a concurrent kernel need not become visible. The
# atomics keep their order, so each value stays for as long as the next ones take.
@triton.jit  # type: ignore[untyped-decorator]
def _let_through(  # type: ignore[no-untyped-def]
    words,
    blocks: tl.constexpr,
    peers: tl.constexpr,
    apart: tl.constexpr,
    ahead: tl.constexpr,
    passes: tl.constexpr,
    padded: tl.constexpr,
):
    counter = tl.arange(0, padded)
    inside = counter < blocks * peers
    for _ in range(passes):
        flag = tl.load(words + 2 * apart + counter // peers, mask=inside, other=0, volatile=True)
        for step in tl.static_range(1, ahead + 1):
            tl.atomic_xchg(words + counter, flag + step, mask=inside, scope="sys")
            tl.atomic_xchg(words + apart + counter, flag + step, mask=inside, scope="sys")


def launch(words: Any, blocks: int, peers: int, apart: int, ahead: int, passes: int) -> None:
    """Let blocks pass at most `passes` times `ahead` barriers, on the current stream.

    `words` (int32) are (blocks, peers) counters, as many again from `apart` on, and from twice that
    on a flag per block. All counters of a block become its flag plus 1 to `ahead`, in turn.
    """
    _let_through[(1,)](
        *(words, blocks, peers, apart, ahead, passes),
        padded=triton.next_power_of_2(blocks * peers),
        num_warps=WARPS,
    )
