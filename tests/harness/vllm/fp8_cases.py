"""Cases of the fp8 GEMM under Triton's interpreter; `test_interpreted_kernels.py` runs them.

They need TRITON_INTERPRET=1 before triton's first import, so they have a process of their own. The
interpreter cuts fp32 to bf16 instead of rounding it; results in fp32 show the sums themselves.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import triton
from triton.runtime import interpreter

from worker.engine.weights import fp8, fp8_kernel
from worker.engine.weights.fp8_kernel import BLOCK_K, Tiling, Workspace, few_tokens_mm

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
SMALL = Tiling(16, 32, 32, 1, 3, 4, False)
COUNTERS = 64
Shape = tuple[int, int, int, int]
# (tokens, outputs, inputs, inputs of the whole weight)
SHAPES: list[Shape] = [
    (1, 48, 64, 128),
    (3, 32, 32, 96),
    (16, 64, 96, 96),
    (17, 80, 112, 448),
    (33, 16, 16, 48),
    (40, 112, 240, 720),
]


class Case:
    """Random operands of one shape; the weight is the second range of inputs of a wider one."""

    def __init__(
        self,
        shape: Shape,
        *,
        per_token: bool = True,
        per_channel: bool = True,
        with_bias: bool = False,
    ) -> None:
        tokens, outputs, inputs, whole = shape
        generator = torch.Generator().manual_seed(sum(shape))

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        first = min(inputs, whole - inputs)
        self.rows = random(outputs, whole).to(FP8)[:, first : first + inputs]
        self.b = self.rows.t()
        self.a = random(tokens, inputs).to(FP8)
        self.scale_a = random(tokens, 1).abs() + 0.1 if per_token else torch.tensor([0.5])
        self.scale_b = random(outputs, 1).abs() + 0.1 if per_channel else torch.tensor(0.25)
        self.bias = random(outputs) if with_bias else None
        self.workspace = Workspace(
            torch.full((1 << 18,), float("nan")), torch.zeros(COUNTERS, dtype=torch.int32)
        )
        self.scale_rows = 0

    def expected(self) -> torch.Tensor:
        out = (self.a.float() * self.scale_a) @ (self.rows.float() * self.scale_b).t()
        return out if self.bias is None else out + self.bias

    def run(self, tiling: Tiling, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return few_tokens_mm(
            *(self.a, self.b, self.scale_a, self.scale_b, dtype),
            workspace=self.workspace,
            bias=self.bias,
            tiling=tiling,
            scale_rows=self.scale_rows,
        )

    def check(self, tiling: Tiling) -> None:
        torch.testing.assert_close(self.run(tiling), self.expected(), rtol=1e-4, atol=1e-4)
        assert not self.workspace.arrivals.any()


class BlockCase(Case):
    """The same with a scale for each block of `ROWS` rows and 128 columns, and 128 of a token."""

    ROWS = 64

    def __init__(self, shape: Shape, *, by_inputs: bool = False) -> None:
        super().__init__(shape)
        tokens, outputs, inputs, _ = shape
        steps = -(-inputs // BLOCK_K)
        generator = torch.Generator().manual_seed(inputs)

        def scales(rows: int) -> torch.Tensor:
            """In one piece by rows or, as quantization for CUTLASS and a replica have them, not."""
            found = torch.rand((rows, steps), generator=generator) + 0.1
            return found.t().contiguous().t() if by_inputs else found

        self.scale_a, self.scale_b = scales(tokens), scales(-(-outputs // self.ROWS))
        self.scale_rows = self.ROWS

    def expected(self) -> torch.Tensor:
        by_token = self.scale_a.repeat_interleave(BLOCK_K, 1)[:, : self.a.shape[1]]
        by_block = self.scale_b.repeat_interleave(BLOCK_K, 1)[:, : self.a.shape[1]]
        by_block = by_block.repeat_interleave(self.ROWS, 0)[: len(self.rows)]
        return (self.a.float() * by_token) @ (self.rows.float() * by_block).t()


def half(*cases: Any, is_short: Callable[..., bool]) -> list[Any]:
    """All cases; those that are not short are `long`."""
    return [
        pytest.param(*case, marks=[] if is_short(*case) else [pytest.mark.long]) for case in cases
    ]


@pytest.mark.parametrize(
    ("shape", "split", "bulk"),
    half(
        *product(SHAPES, (1, 2, 3), (False, True)),
        is_short=lambda shape, split, bulk: (SHAPES.index(shape) + split) % 2 == bulk,
    ),
)
def test_any_shape_of_any_stride(shape: Shape, split: int, bulk: bool) -> None:
    Case(shape).check(replace(SMALL, split=split, bulk=bulk))


@pytest.mark.parametrize(
    ("split", "per_channel", "per_token", "with_bias"),
    half(*product((1, 2), *[(False, True)] * 3), is_short=lambda *case: sum(case) % 2 == 1),
)
def test_scales_and_bias(split: int, per_channel: bool, per_token: bool, with_bias: bool) -> None:
    case = Case(SHAPES[3], per_token=per_token, per_channel=per_channel, with_bias=with_bias)
    case.check(replace(SMALL, split=split))


IN_BLOCKS = [(1, 48, 256, 512), (17, 80, 256, 768), (33, 144, 384, 768)]


@pytest.mark.parametrize(
    ("shape", "split", "bulk", "by_inputs"),
    half(
        *product(IN_BLOCKS, (1, 2), (False, True), (False, True)),
        is_short=lambda shape, split, bulk, by_inputs: (
            IN_BLOCKS.index(shape) % 2 == (split == bulk + 1) == by_inputs
        ),
    ),
)
def test_scales_of_blocks(shape: Shape, split: int, bulk: bool, by_inputs: bool) -> None:
    case = BlockCase(shape, by_inputs=by_inputs)
    case.check(Tiling(16, 32, BLOCK_K, split, 3, 4, bulk))


def test_scales_of_blocks_need_steps_of_a_block() -> None:
    with pytest.raises(AssertionError, match="block_k=32"):
        BlockCase(IN_BLOCKS[0]).run(SMALL)


TILINGS = [
    Tiling(32, 64, 64, 2, 3, 4, False),
    Tiling(64, 16, 128, 1, 3, 4, True),
    Tiling(16, 128, 256, 1, 3, 4, False),
    Tiling(16, 16, 32, 8, 3, 4, True),
]


@pytest.mark.parametrize(
    ("shape", "tiling"),
    half(
        *product(SHAPES[-2:], TILINGS),
        is_short=lambda shape, tiling: (shape == SHAPES[-2]) == tiling.bulk,
    ),
)
def test_any_tiling(shape: Shape, tiling: Tiling) -> None:
    """Also tiles larger than the matrix, and parts that have nothing to add."""
    Case(shape).check(tiling)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("split", [1, 2])
def test_results_are_rounded_once(split: int, dtype: torch.dtype) -> None:
    case = Case(SHAPES[3], with_bias=True)
    assert case.bias is not None
    case.bias = case.bias.to(dtype)
    tiling = replace(SMALL, split=split)
    out = case.run(tiling, dtype)
    assert out.dtype == dtype
    if dtype == torch.float16:
        assert torch.equal(out, case.run(tiling).to(dtype))
    torch.testing.assert_close(out.float(), case.expected(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    "shapes",
    [SHAPES[:4], pytest.param(SHAPES, marks=pytest.mark.long)],
    ids=["small shapes", "all shapes"],
)
def test_the_workspace_serves_one_call_after_another(shapes: list[Shape]) -> None:
    """Counters go back to zero, and what a part left behind is never added again."""
    cases = [Case(shape) for shape in shapes]
    for number, case in enumerate([*cases, *cases]):
        case.workspace = cases[0].workspace
        case.check(replace(SMALL, split=2 + number % 3, bulk=bool(number % 2)))
        first = case.run(replace(SMALL, split=4))
        assert torch.equal(first, case.run(replace(SMALL, split=4)))


@pytest.mark.parametrize(
    ("shape", "split"),
    half(
        *((SHAPES[2], split) for split in (2, 3)),
        *((SHAPES[-1], split) for split in (2, 3, 5)),
        is_short=lambda shape, split: shape == SHAPES[2],
    ),
)
def test_bits_do_not_depend_on_who_arrives_last(
    shape: Shape, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, tiling = Case(shape), replace(SMALL, split=split)
    # Sums of numbers of one size are exact in fp32, in any order.
    sizes = 2.0 ** (torch.arange(case.a.shape[1]) % 13 - 6)
    case.a = (case.a.float() * sizes).to(FP8)
    forwards = case.run(tiling)
    builder: Any = interpreter.interpreter_builder
    place = builder.set_grid_idx

    def backwards(x: int, y: int, z: int) -> None:
        place(x, y, split - 1 - z)

    monkeypatch.setattr(builder, "set_grid_idx", backwards)
    assert torch.equal(case.run(tiling), forwards)
    assert not case.workspace.arrivals.any()


def test_bits_of_a_token_do_not_depend_on_the_others() -> None:
    case = Case(SHAPES[3])
    whole = case.run(SMALL)
    case.a, case.scale_a = case.a[7:8], case.scale_a[7:8]
    assert torch.equal(case.run(SMALL), whole[7:8])


def test_what_lies_outside_is_neither_read_nor_written() -> None:
    """Tokens and columns beside the operands are NaN; the row of a token may be a wider one."""
    case = Case(SHAPES[3])
    tokens, inputs = case.a.shape
    backing = torch.full((tokens + 3, inputs + 32), float("nan")).to(FP8)
    backing[1 : tokens + 1, 16 : 16 + inputs] = case.a
    case.a = backing[1 : tokens + 1, 16 : 16 + inputs]
    whole = torch.full((case.rows.shape[0] + 1, inputs + 32), float("nan")).to(FP8)
    whole[:-1, 16 : 16 + inputs] = case.rows
    case.rows = whole[:-1, 16 : 16 + inputs]
    case.b = case.rows.t()
    for split in (1, 2):
        case.check(replace(SMALL, split=split))


@pytest.mark.parametrize("wrong", ["strides", "scale", "part", "block"])
def test_the_comparison_sees_sabotage(wrong: str) -> None:
    case = BlockCase(IN_BLOCKS[0]) if wrong == "block" else Case(SHAPES[0])
    tiling = replace(SMALL, split=2, block_k=BLOCK_K if wrong == "block" else SMALL.block_k)
    expected = case.expected()
    if wrong == "strides":
        case.b = case.b.as_strided(case.b.shape, (1, case.b.shape[0]))
    elif wrong in ("scale", "block"):
        case.scale_b = case.scale_b.roll(1, int(wrong == "block"))
    else:
        case.workspace.arrivals.add_(1)
    assert not torch.allclose(case.run(tiling), expected, rtol=1e-2, atol=1e-2)


def test_no_tokens_are_no_launch() -> None:
    case = Case(SHAPES[0])
    out = few_tokens_mm(
        *(case.a[:0], case.b, case.scale_a[:0], case.scale_b, torch.bfloat16),
        workspace=case.workspace,
    )
    assert out.shape == (0, 48)


def test_parts_that_the_workspace_cannot_hold_are_refused() -> None:
    case = Case((16, 16, 16, 16))
    with pytest.raises(AssertionError, match="workspace"):
        case.run(Tiling(16, 1 << 20, 16, 2, 3, 4, False))


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 100, 256])
def test_the_layers_kernel_uses_it_for_few_tokens(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`StridedFp8Kernel`, as it is on a GPU that runs the kernel, with the tiling it would have."""
    monkeypatch.setattr(fp8, "is_hopper", lambda device: True)
    fp8_kernel.workspace_of.cache_clear()
    kernel = fp8.StridedFp8Kernel.__new__(fp8.StridedFp8Kernel)
    kernel.prepare(CPU)
    fp8_kernel.workspace_of.cache_clear()
    case = Case((tokens, 64, 128, 256), with_bias=True)
    calls = []
    launch = kernel.few_tokens
    assert launch is not None

    def counted(*operands: Any, **named: Any) -> torch.Tensor:
        calls.append(len(operands[0]))
        return launch(*operands, **named)

    kernel.few_tokens = counted
    out = kernel.apply_scaled_mm(
        A=case.a,
        B=case.b,
        As=case.scale_a,
        Bs=case.scale_b,
        out_dtype=torch.bfloat16,
        bias=case.bias,
        output_shape=[tokens, 1, 64],
    )
    assert calls == [tokens]
    assert out.shape == (tokens, 1, 64)
    torch.testing.assert_close(out[:, 0].float(), case.expected(), rtol=2**-6, atol=2**-5)


def test_the_interpreter_runs() -> None:
    assert triton.knobs.runtime.interpret
