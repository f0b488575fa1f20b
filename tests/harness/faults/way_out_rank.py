"""One of two ranks of a group, whose other one does nothing and is killed in the end.

`tests.harness.faults.way_out_rank RANK PORT`. Rank 0 launches collectives alone, so that they
wait for ever, and gets out of each; it prints what came of it, one JSON object per line. What the
counters hold is printed beside a collective that does not end.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from comm_pool.cuda.collective_abort import CollectiveAborter, SignalPump
from comm_pool.pool import _warm
from worker.engine.device import _share_device

LIMIT_S = 120
ROUNDS = 8
"""Of draining, 0.08 s each."""

WAITS_S = 0.3
SMALL = (16, 128)
LARGE = 8 << 20
IN_GRAPH = 8
LOOKED_AT = (0, 1, 35)


class Survivor:
    """Rank 0 with its group."""

    def __init__(self, group: Any, device: torch.device, peer: int) -> None:
        self._peer = peer
        self._aside = torch.cuda.Stream(device, priority=-1)
        self._drainer = SignalPump(device)
        self._way = CollectiveAborter(group, self._drainer, lambda: 0)

    def kill_peer(self) -> None:
        """End the other process, as the kernel would."""
        os.kill(self._peer, signal.SIGKILL)
        time.sleep(1.0)

    def get_out(self, name: str, *launches: Callable[[], Any], closes: bool = False) -> bool:
        """Launch one behind the other, see that the first one waits, and let all through."""
        signals = self._way.signal
        assert signals is not None, "custom all-reduce is on"
        ends = [torch.cuda.Event() for _ in launches]
        for launch, end in zip(launches, ends, strict=True):
            launch()
            end.record()
        started_s = time.monotonic()
        time.sleep(WAITS_S)
        told: dict[str, Any] = {"what": name, "waits": not ends[0].query()}
        told["closed"] = self._way.close() if closes else None
        for _ in range(ROUNDS):
            self._drainer.drain([signals], lambda: not ends[-1].query())
        told["ended"] = ends[-1].query()
        told["parts"] = [end.query() for end in ends]
        told["seconds"] = round(time.monotonic() - started_s - WAITS_S, 3)
        if not told["ended"]:
            with torch.cuda.stream(self._aside):
                words, apart, peers = signals._words.tolist(), signals._apart, signals._peers
                told["start_end_flag"] = {
                    block: [
                        *(words[first + block * peers :][:2] for first in (0, apart)),
                        words[2 * apart + block],
                    ]
                    for block in LOOKED_AT
                }
        print(json.dumps(told), flush=True)
        if told["ended"]:
            # A drain outlives what it lets through, and would let the next one through at once.
            torch.cuda.synchronize()
        return bool(told["ended"])


def run(rank: int, port: int) -> None:
    """Make the group; then rank 0 gets out of one collective after the other."""
    index = rank % torch.cuda.device_count()
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    for kind in ("SYMM_MEM", "FLASHINFER"):
        os.environ[f"VLLM_ALLREDUCE_USE_{kind}"] = "0"
    if torch.cuda.device_count() == 1:
        _share_device()
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=2)
    parallel_state.init_distributed_environment(2, rank, address, index, "nccl")
    parallel_state.initialize_model_parallel(1)
    group = parallel_state.init_model_parallel_group([[0, 1]], index, "nccl", group_name="tp")
    _warm(group, device, exchanges=True)
    small = torch.ones(SMALL, dtype=torch.bfloat16, device=device)
    large = torch.ones(LARGE, dtype=torch.bfloat16, device=device)
    reduces = captured(group, small, gathers=False)
    gathers = captured(group, small, gathers=True)
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid(), group=group.cpu_group)
    if rank == 1:
        time.sleep(LIMIT_S)
        return
    survivor = Survivor(group, device, pids[1])
    went_on = survivor.get_out("a small all-reduce", lambda: group.all_reduce(small))
    went_on = went_on and survivor.get_out("a graph", reduces.replay)
    survivor.kill_peer()
    went_on = went_on and survivor.get_out("of a dead peer", lambda: group.all_reduce(small))
    if went_on:
        queued = (
            *(reduces.replay, lambda: group.all_gather(small, dim=-1), gathers.replay),
            *(lambda: group.all_reduce(large), lambda: group.all_gather(large, dim=0)),
            reduces.replay,
        )
        survivor.get_out("custom all-reduce and NCCL, in turn", *queued, closes=True)


def captured(group: Any, small: torch.Tensor, *, gathers: bool) -> torch.cuda.CUDAGraph:
    """Some all-reduces as a CUDA graph, with a gather of NCCL's behind them or without."""
    graph = torch.cuda.CUDAGraph()
    with group.graph_capture() as context, torch.cuda.graph(graph, stream=context.stream):
        summed = small
        for _ in range(IN_GRAPH):
            summed = group.all_reduce(summed)
        if gathers:
            group.all_gather(small, dim=-1)
    graph.replay()
    torch.cuda.synchronize()
    assert float(summed[0, 0]) == 2.0**IN_GRAPH
    return graph


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    with set_current_vllm_config(VllmConfig()):
        run(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
