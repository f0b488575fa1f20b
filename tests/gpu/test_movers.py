"""Units between two GPUs, by CUDA IPC and by NCCL: every byte against a numpy model.

Needs two NVIDIA GPUs with peer-to-peer access, torch and Triton, no vLLM.
"""

import pytest
import torch

from tests.harness.vllm.mover_ranks import move_both_ways, move_often, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


def ranks() -> int:
    """One process per GPU, at most four."""
    return min(4, int(torch.cuda.device_count()))


def test_all_ranks_move_at_once_either_way() -> None:
    rounds = 6
    pages = [64, 48, 80, 64][: ranks()]
    for answer in run_ranks(len(pages), move_both_ways, pages, rounds, device="cuda", limit_s=150):
        assert answer["right"] == dict.fromkeys(("peer", "exchange", "host"), [True] * rounds)


def test_nothing_grows_over_moves() -> None:
    for answer in run_ranks(ranks(), move_often, 200, device="cuda", limit_s=150):
        (files, regions), (files_after, regions_after) = answer["before"], answer["after"]
        assert files_after <= files
        assert regions_after <= regions + 8  # the C library takes some for itself
