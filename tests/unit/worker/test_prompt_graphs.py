"""Which sizes of steps that read prompts get a CUDA graph."""

import pytest

pytest.importorskip("vllm")

from worker.engine.runners.gpu import is_launch_bound, prompt_graph_sizes

USUAL = [32, 64, 128, 256, 384, 512, 768, 1024]


def test_a_small_model_in_a_wide_group_gets_graphs_of_longer_steps() -> None:
    """8B in tp2 on two H200s: eager steps of 1,088 and 2,048 tokens take 28 and 35 ms."""
    assert is_launch_bound(0.028, 0.035)
    assert prompt_graph_sizes(8192, borrows=False, is_launch_bound=True) == [
        *USUAL,
        1280,
        1536,
        2048,
    ]


def test_where_computation_bounds_steps_padding_would_make_them_longer() -> None:
    """8B in dp: 28 and 48 ms."""
    assert not is_launch_bound(0.028, 0.048)
    assert prompt_graph_sizes(8192, borrows=False) == USUAL


@pytest.mark.parametrize(
    ("batched_tokens_max", "borrows", "sizes"),
    [(512, False, USUAL[:6]), (8192, True, [256, 512, 768, 1024])],
)
def test_no_size_is_out_of_reach_or_shorter_than_the_loans(
    batched_tokens_max: int, borrows: bool, sizes: list[int]
) -> None:
    assert prompt_graph_sizes(batched_tokens_max, borrows=borrows) == sizes
