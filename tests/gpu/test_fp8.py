"""fp8 on two GPUs: the losses of static vLLM in dp and tp, and the kernels that tp trees need.

Needs two NVIDIA GPUs of compute capability 8.9 or more and vLLM's CUDA build:
`python -m pytest -m gpu tests/gpu/test_fp8.py -s` prints what was measured.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.vllm import cuda_scores
from tests.harness.vllm.graph_times import microseconds

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

QUANTIZATION = "fp8_per_tensor"
"""vLLM quantizes the bf16 demo model while loading it."""

ENGINE = ["--quantization", QUANTIZATION, *cuda_scores.ENGINE]
LENGTHS = (600, 200)
"""Tokens of the two texts: on both sides of worker.engine.weights.fp8.FEW_TOKENS."""


def texts() -> list[list[int]]:
    """Stretches of held-out text."""
    whole = cuda_scores.text()
    return [whole[:length] for length in LENGTHS]


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """Plain vLLM's scores by tp size."""
    folder = tmp_path_factory.mktemp("static-fp8")
    return {
        tp: cuda_scores.scores_of(folder, texts(), tp=tp, quantization=QUANTIZATION)
        for tp in (1, 2)
    }


@pytest.fixture(scope="module")
def cell(
    static: dict[int, list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareCell]:
    """Two GPUs with the demo model in fp8. That it serves says that the self-test has passed."""
    folder = tmp_path_factory.mktemp("fp8")
    with bare_cell(folder, ranks=2, engine_args=ENGINE, device="cuda") as up:
        yield up


async def score(cell: BareCell, layout: str) -> list[Any]:
    """Teacher-forced log-probabilities of each text in one layout."""
    await asyncio.to_thread(cell.switch, layout, "recompute")
    scores = []
    for ids in texts():
        client = TaskClient()
        async with client.connected(cell):
            name = f"score-{layout}-{len(ids)}"
            client.submit(name, ids, max_tokens=1, prompt_logprobs=0)
            stream = (await client.finish(name))[0]
        scores.append(np.asarray(stream.prompt_logprobs.logprobs)[:, 0])
    return scores


def test_loss_is_that_of_static_vllm(static: dict[int, list[Any]], cell: BareCell) -> None:
    for layout, width in (("dp2", 1), ("tp2", 2)):
        for number, scores in enumerate(asyncio.run(score(cell, layout))):
            wanted = static[width][number]
            by_nature = np.abs(static[2][number] - static[1][number]).max()
            error = np.abs(scores - wanted).max()
            line = f"{layout} {len(scores)} tokens: loss {-scores.mean():.4f}"
            print(line, f"static {-wanted.mean():.4f} largest {error:.4f} of {by_nature:.4f}")
            # Rounding to fp8 turns a last bit into a step of 1/16; the mean must not move.
            assert error <= max(2 * by_nature, 1e-3), line
            assert abs(scores.mean() - wanted.mean()) < 0.02, line


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_strided_product_is_right_where_cutlass_is_not(per_channel: bool) -> None:
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    from worker.engine.weights.fp8 import strided_scaled_mm

    current_platform.import_kernels()
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device="cuda")

    outputs, inputs = 4096, 14336
    whole = random(outputs, inputs).to(torch.float8_e4m3fn)
    scale = torch.full((1,), 0.25, device="cuda")
    if per_channel:
        scale = random(outputs, 1).abs() + 0.1
    view, packed = whole[:, inputs // 2 :].t(), whole[:, inputs // 2 :].contiguous().t()
    unit = torch.ones(1, device="cuda")
    for tokens in (1, 8, 64, 256, 257, 4096):
        x = random(tokens, inputs // 2).to(torch.bfloat16)
        a, by_token = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        wanted = (a.float() * by_token) @ (packed.float() * scale.reshape(1, -1))
        ours = partial(strided_scaled_mm, a, view, by_token, scale, torch.bfloat16, unit)
        right, wrong = (
            partial(ops.cutlass_scaled_mm, a, b, by_token, scale, torch.bfloat16)
            for b in (packed, view)
        )
        errors = [
            float((out.float() - wanted).norm() / wanted.norm())
            for out in (ours(), right(), wrong())
        ]
        rows = by_token.reshape(-1, 1), scale.reshape(1, -1).expand(1, outputs).contiguous()
        by_rows = partial(torch._scaled_mm, a, view, *rows, out_dtype=torch.bfloat16)
        times = [microseconds(each) for each in (ours, right, by_rows)]
        print(f"{tokens} tokens: errors {errors}, us {times} (ours, cutlass packed, row-wise)")
        assert errors[0] < 5e-3
        assert errors[1] < 5e-3
        assert errors[2] > 0.5, "vLLM's kernel honours strides now: tp trees can go on using it"


FEW = (1, 7, 16, 17, 32, 64, 100, 128, 129, 256)
"""Tokens of both kinds, full tiles and others, in every bucket of `fp8_kernel`."""


def few_token_tilings(tokens: int, outputs: int, inputs: int) -> list[Any]:
    """The one that serves, and it with other numbers of parts, another loader, an early launch."""
    from dataclasses import replace

    from worker.engine.weights.fp8_kernel import tiling_for

    chosen = tiling_for(tokens, outputs, inputs)
    found = [chosen, replace(chosen, bulk=not chosen.bulk), replace(chosen, early=True)]
    found += [replace(chosen, split=split) for split in (1, 2, 3, 5)]
    return [each for each in found if each.fits(tokens, outputs)]


@pytest.mark.parametrize("outputs", [4096, 4112])
@pytest.mark.parametrize("inputs", [1792, 3600])
def test_few_tokens_are_multiplied_right_and_alike_every_time(outputs: int, inputs: int) -> None:
    """All ways, launched alone and from a graph; also where tiles do not divide the matrix."""
    import torch

    from worker.engine.weights.fp8_kernel import few_tokens_mm, workspace_of

    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("the kernel is for Hopper GPUs")
    generator = torch.Generator("cuda").manual_seed(outputs + inputs)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device)

    view = random(outputs, 4 * inputs).to(torch.float8_e4m3fn)[:, inputs : 2 * inputs].t()
    channels, one = random(outputs, 1).abs() + 0.1, torch.full((1,), 0.25, device=device)
    workspace = workspace_of(device)
    for tokens in FEW:
        a = random(tokens, inputs).to(torch.float8_e4m3fn)
        by_token = random(tokens, 1).abs() + 0.1
        for number, tiling in enumerate(few_token_tilings(tokens, outputs, inputs)):
            scales = [(by_token, channels), (one, one), (one, channels), (by_token, one)]
            scale_a, scale_b = scales[number % 4]
            bias = random(outputs).to(torch.bfloat16) if number % 2 else None
            run = partial(
                few_tokens_mm,
                *(a, view, scale_a, scale_b, torch.bfloat16),
                workspace=workspace,
                bias=bias,
                tiling=tiling,
            )
            out = run()
            wanted = (a.float() * scale_a) @ (view.float() * scale_b.view(1, -1))
            wanted += 0 if bias is None else bias.float()
            error = float((out.float() - wanted).norm() / wanted.norm())
            assert error < 5e-3, (tokens, tiling, error)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = [run() for _ in range(10)]
            for _ in range(5):
                graph.replay()
            assert all(torch.equal(each, out) for each in outs), (tokens, tiling)
            assert not workspace.arrivals.any(), (tokens, tiling)


def test_few_tokens_take_about_as_long_as_cutlass_on_packed_weights() -> None:
    """Prints the times of Llama 3 70B in tp4; weights stay in the cache here, as in no model."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    from worker.engine.weights.fp8_kernel import few_tokens_mm, workspace_of

    current_platform.import_kernels()
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("the kernel is for Hopper GPUs")
    for outputs, inputs, whole in ((8192, 2048, 8192), (8192, 7168, 28672)):
        rows = torch.randn(outputs, whole, device=device).to(torch.float8_e4m3fn)
        views = [part.t() for part in rows.chunk(whole // inputs, 1)]
        channels = torch.rand(outputs, 1, device=device)
        for tokens in (1, 8, 64, 256):
            a = torch.randn(tokens, inputs, device=device).to(torch.float8_e4m3fn)
            by_token = torch.rand(tokens, 1, device=device)
            rest = (by_token, channels, torch.bfloat16)
            ours = partial(few_tokens_mm, a, views[1], *rest, workspace=workspace_of(device))
            packed = views[1].t().contiguous().t()
            vllms = partial(ops.cutlass_scaled_mm, a, packed, *rest)
            times = [microseconds(each) for each in (ours, vllms)]
            print(f"{outputs}x{inputs}, {tokens} tokens: us {times} (ours, cutlass packed)")
            # A wide bound: the benchmark measures, this only sees that something is very wrong.
            assert times[0] < 1.5 * times[1] + 2


def test_weights_that_are_quantized_while_loading_leave_no_part_of_a_block_behind() -> None:
    """Ten of the 80 layers of a 70B model, each weight beside the bf16 one that it is made of."""
    import torch

    from worker.engine.device import whole_blocks

    device = torch.device("cuda", 0)

    def unused() -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))

    def load() -> list[torch.Tensor]:
        weights = []
        for _ in range(10):
            for mib in (80, 64, 448, 224):
                wide = torch.empty(mib << 20, dtype=torch.bfloat16, device=device)
                weights.append(torch.empty(mib << 20, dtype=torch.float8_e4m3fn, device=device))
                del wide
        return weights

    before = unused()
    with whole_blocks(device):
        weights = load()
    left = unused() - before
    del weights
    assert unused() <= before
    weights = load()
    left_otherwise = unused() - before
    print(f"left behind: {left} bytes, with blocks that are split {left_otherwise}")
    assert left <= 0
    assert left_otherwise > 32 << 20
    del weights
