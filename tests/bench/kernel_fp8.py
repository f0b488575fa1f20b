"""Tunes, times and checks the fp8 GEMM of few tokens over column ranges, on one Hopper GPU.

`python -m tests.bench.kernel_fp8 --json fp8.json` tries the tilings of kernel_fp8_tilings.py for
every shape and bucket, then times the winners for 1 to 256 tokens against `torch._scaled_mm` as
worker/engine/weights/fp8.py uses it without our kernel, and against vLLM's CUTLASS kernel on packed
copies. Times are microseconds of one GEMM in a CUDA graph that goes through more weights than the
cache holds; "layer" times have vLLM's quantization of the input in front of each GEMM. Prints a
table, the winners as source for `worker.engine.weights.fp8_kernel.TUNED`, and writes JSON. With
`--in-blocks`, blocks of 128 x 128 have a scale each, and vLLM's Triton kernel is in torch's place.
`--dry-run` only counts what it would try; a CPU will do. Exit status 1 if a result is wrong.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.graph_time import replay_us
from tests.bench.kernel_fp8_tilings import SHAPES, tilings, to_compile
from worker.engine.weights.fp8_kernel import (
    BLOCK_K,
    BUCKETS,
    Tiling,
    bucket_of,
    default_tiling,
    few_tokens_mm,
    workspace_of,
)

# vLLM is imported after the processes that compile are forked: it may touch CUDA.

FP8 = torch.float8_e4m3fn
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COLD_BYTES = 200 << 20
"""Weights of one graph: several times an H200's L2 cache."""
GEMMS_MAX = 48
REPEATS = 7
EARLY_GAIN = 0.98
"""Part of a layer's time that an early launch must not exceed to be chosen."""
ERROR_MAX = 5e-3
GUARD_S = 8.0
"""Kept of the time limit for the table and the files."""


def compile_one(tiling: Tiling, in_blocks: bool) -> str | None:
    """In a process of its own: compile, run on a small weight, leave the binary in Triton's cache.

    Returns:
        Why this tiling cannot run, or None.
    """
    outputs, inputs = tiling.block_n, 2 * tiling.block_k
    device = torch.device("cuda", 0)
    a = torch.zeros(1, inputs, dtype=torch.uint8, device=device).view(FP8)
    rows = torch.zeros(outputs, 2 * inputs, dtype=torch.uint8, device=device).view(FP8)
    one = torch.ones((1, 2) if in_blocks else (1,), device=device)
    try:
        for early in (False, True):
            out = few_tokens_mm(
                *(a, rows[:, inputs:].t(), one, one, torch.bfloat16),
                workspace=workspace_of(device),
                tiling=replace(tiling, early=early),
                scale_rows=BLOCK_K if in_blocks else 0,
            )
            if float(out.abs().max()):
                return "adds up zeros to something else"
    except Exception as error:  # noqa: BLE001 -- Triton has many; the sweep goes on without it.
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


Calls = list[Callable[[], torch.Tensor]]
Way = tuple[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], list[torch.Tensor]]


@dataclass
class Operands:
    """Weights of one shape for a graph, and inputs of each number of tokens."""

    name: str
    in_blocks: bool

    def __post_init__(self) -> None:
        self.outputs, self.inputs, whole = SHAPES[self.name]
        ranks = whole // self.inputs
        count = min(GEMMS_MAX, -(-COLD_BYTES // (self.outputs * self.inputs)))
        count = -(-count // ranks) * ranks
        generator = torch.Generator("cuda").manual_seed(0)
        make = {"generator": generator, "device": "cuda"}
        self.views: list[torch.Tensor] = []
        for _ in range(count // ranks):
            rows = torch.randn(self.outputs, whole, **make).to(FP8)
            self.views += [part.t() for part in rows.chunk(ranks, 1)]
        steps = self.inputs // BLOCK_K if self.in_blocks else 1
        self.scale_rows = BLOCK_K if self.in_blocks else 0
        self.scale = torch.rand(self.outputs // (self.scale_rows or 1), steps, **make) + 0.1
        self.a = torch.randn(BUCKETS[-1], self.inputs, **make).to(FP8)
        self.by_token = torch.rand(BUCKETS[-1], steps, **make) + 0.1
        self.unit = torch.ones(1, device="cuda")
        self.reference: torch.Tensor | None = None

        self.x = self.a.to(torch.bfloat16)

    def ways(self, tiling: Tiling, packed: list[torch.Tensor]) -> dict[str, Way]:
        """GEMM functions of quantized tokens, a weight and token scales, with their weights."""
        from worker.engine.weights.fp8 import strided_scaled_mm

        def torchs(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            if self.in_blocks:
                return vllms_triton(a, b.t(), scale, self.scale)
            return strided_scaled_mm(a, b, scale, self.scale, torch.bfloat16, self.unit)

        found: dict[str, Way] = {
            "ours": (partial(self.ours, tiling), self.views),
            "early": (partial(self.ours, replace(tiling, early=True)), self.views),
            "torch": (torchs, self.views),
        }
        if packed:
            from vllm import _custom_ops as ops

            def cutlass(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
                scale_b = self.scale.t() if self.in_blocks else self.scale
                return ops.cutlass_scaled_mm(a, b, scale, scale_b, torch.bfloat16)

            found["cutlass"] = (cutlass, packed)
        return found

    def ours(
        self, tiling: Tiling, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """One GEMM by our kernel."""
        return few_tokens_mm(
            *(a, b, scale, self.scale, torch.bfloat16),
            workspace=workspace_of(a.device),
            tiling=tiling,
            scale_rows=self.scale_rows,
        )

    def gemms(self, tokens: int, way: Way) -> Calls:
        """One call per weight; CUTLASS wants scales of tokens by columns."""
        run, weights = way
        by_token = self.by_token[:tokens].t().contiguous().t()
        return [partial(run, self.a[:tokens], each, by_token) for each in weights]

    def layers(self, tokens: int, way: Way) -> Calls:
        """One call per weight, each with the quantization of its input."""
        from vllm import _custom_ops as ops

        run, weights = way

        def layer(b: torch.Tensor) -> torch.Tensor:
            if self.in_blocks:
                a, scale = in_groups(self.x[:tokens])
                return run(a, b, scale)
            a, scale = ops.scaled_fp8_quant(self.x[:tokens], use_per_token_if_dynamic=True)
            return run(a, b, scale)

        return [partial(layer, each) for each in weights]

    def error(self, out: torch.Tensor) -> float:
        """Relative to an fp32 product with the first weight."""
        if self.reference is None:
            columns = BLOCK_K if self.in_blocks else self.inputs
            tokens = self.a.float() * self.by_token.repeat_interleave(columns, 1)
            scales = self.scale.repeat_interleave(columns, 1)
            scales = scales.repeat_interleave(self.scale_rows or 1, 0)
            self.reference = tokens @ (self.views[0].float() * scales.t())
        wanted = self.reference[: len(out)]
        found = float((out.float() - wanted).norm() / wanted.norm())
        return found if found == found else float("inf")


def vllms_triton(
    a: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """(M, K) · (N, K) -> (M, N), with the tiling that vLLM has for this shape."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    out: torch.Tensor = fp8_utils.w8a8_triton_block_scaled_mm(
        a, rows, scale, scales, [BLOCK_K, BLOCK_K], torch.bfloat16
    )
    return out


def in_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, K) in fp8 and its scales (M, K / 128), as vLLM quantizes the input for CUTLASS."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    found: tuple[torch.Tensor, torch.Tensor] = fp8_utils.per_token_group_quant_fp8(
        x, BLOCK_K, column_major_scales=True, use_ue8m0=False
    )
    return found


def microseconds(calls: Calls) -> float:
    """Median device time of one of the calls, which go into one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return round(replay_us(graph.replay, len(calls), REPEATS), 2)


def tune(operands: Operands, bucket: int, refused: set[Tiling]) -> dict[str, Any]:
    """The fastest tiling of one bucket that gives the right result."""
    found: list[tuple[float, Tiling]] = []
    wrong = []
    blocks = {"in_blocks": operands.in_blocks}
    for tiling in tilings(bucket, operands.outputs, operands.inputs, **blocks):
        if replace(tiling, split=min(tiling.split, 2)) in refused:
            continue
        calls = operands.gemms(bucket, (partial(operands.ours, tiling), operands.views))
        out = calls[0]()
        if not operands.error(out) < ERROR_MAX or not torch.equal(out, calls[0]()):
            wrong.append(astuple(tiling))
            continue
        found.append((microseconds(calls), tiling))
    assert found, f"no tiling of {operands.name} is right for {bucket} tokens: {wrong}"
    found.sort(key=lambda each: each[0])
    default = default_tiling(bucket, operands.outputs, operands.inputs, **blocks)
    return {
        "shape": operands.name,
        "bucket": bucket,
        "tried": len(found),
        "wrong": wrong,
        "us": found[0][0],
        "tiling": found[0][1],
        "default_us": next((us for us, tiling in found if tiling == default), None),
        "five_best": [(us, astuple(tiling)) for us, tiling in found[:5]],
    }


def compare(operands: Operands, best: dict[int, Tiling], cutlass: bool) -> list[dict[str, Any]]:
    """All ways for every number of tokens."""
    packed = [view.t().contiguous().t() for view in operands.views] if cutlass else []
    rows = []
    for tokens in TOKENS:
        ways = operands.ways(best[bucket_of(tokens)], packed)
        row: dict[str, Any] = {"shape": operands.name, "tokens": tokens}
        for name, way in ways.items():
            calls = operands.gemms(tokens, way)
            row[f"{name}_error"] = round(operands.error(calls[0]()), 6)
            row[f"{name}_us"] = microseconds(calls)
            if cutlass:
                row[f"{name}_layer_us"] = microseconds(operands.layers(tokens, way))
        weight = operands.outputs * operands.inputs
        read = weight + tokens * (operands.inputs + 2 * operands.outputs)
        row["ours_gb_s"] = round(read / row["ours_us"] / 1e3)
        if cutlass:
            plain, early = (operands.layers(tokens, ways[name])[0]() for name in ("ours", "early"))
            row["early_differs"] = not torch.equal(plain, early)
        rows.append(row)
    return rows


def launch_early(tuned: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Make the winners of buckets launch early where a layer gains by it."""
    for row in tuned:
        for timed in rows:
            same = (timed["shape"], timed["tokens"]) == (row["shape"], row["bucket"])
            if same and "early_layer_us" in timed:
                early = timed["early_layer_us"] < EARLY_GAIN * timed["ours_layer_us"]
                row["tiling"] = replace(row["tiling"], early=early)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def source_of(tuned: list[dict[str, Any]], in_blocks: bool) -> str:
    """The winners as Python."""
    name = "TUNED_IN_BLOCKS" if in_blocks else "TUNED"
    lines = [f"{name}: dict[tuple[int, int, int], Tiling] = {{"]
    for row in tuned:
        outputs, inputs, _ = SHAPES[row["shape"]]
        fields = ", ".join(str(value) for value in astuple(row["tiling"]))
        lines.append(f"    ({row['bucket']}, {outputs}, {inputs}): Tiling({fields}),")
    return "\n".join([*lines, "}"])


def compile_all(names: list[str], jobs: int, in_blocks: bool) -> tuple[set[Tiling], bool]:
    """Fill Triton's cache; this process must not have touched CUDA yet.

    Returns:
        The tilings, as `to_compile` names them, that cannot run; and `has_cutlass`.
    """
    kernels = to_compile(names, in_blocks=in_blocks)
    refused = set()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        compiled = partial(compile_one, in_blocks=in_blocks)
        reasons = pool.map(compiled, kernels)  # Forks all processes here.
        cutlass = has_cutlass()
        for number, (tiling, why) in enumerate(zip(kernels, reasons, strict=True), 1):
            if why is not None:
                refused.add(tiling)
                say(f"refused {tiling}: {why}")
            if number % 16 == 0 or number == len(kernels):
                say(f"compiled {number} of {len(kernels)}")
    return refused, cutlass


def has_cutlass() -> bool:
    """Whether vLLM's CUDA kernels are there."""
    try:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        return hasattr(torch.ops._C, "cutlass_scaled_mm")
    except Exception as error:  # noqa: BLE001 -- a comparison less, said aloud
        say(f"without vLLM's CUTLASS: {error}")
        return False


def sweep(names: list[str], deadline: float, jobs: int, in_blocks: bool) -> dict[str, Any]:
    """Tune and compare shape by shape until the time is up; every shape is whole or left out."""
    refused, cutlass = compile_all(names, jobs, in_blocks)
    tuned: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    longest = 0.0
    for name in names:
        started = time.monotonic()
        if started + longest > deadline:
            left_out.append(name)
            continue
        operands = Operands(name, in_blocks)
        found = [tune(operands, bucket, refused) for bucket in BUCKETS]
        for row in found:
            say(
                f"{name} {row['bucket']:>3}: {row['us']:.2f} us of {row['tried']} tilings "
                f"(default {row['default_us']}): {row['tiling']}"
            )
        tuned += found
        rows += compare(operands, {row["bucket"]: row["tiling"] for row in found}, cutlass)
        del operands
        longest = max(longest, time.monotonic() - started)
    launch_early(tuned, rows)
    return {"tuned": tuned, "rows": rows, "left_out": left_out}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Times of GEMMs and layers by shape and tokens; GB/s of our GEMM."""
    ways = ("ours", "early", "torch", "cutlass")
    columns = [f"{way}_us" for way in ways] + [f"{way}_layer_us" for way in ways]
    heads = [*ways, *(f"l-{way}" for way in ways)]
    print(f"{'shape':<14}{'tokens':>7}", *(f"{each:>9}" for each in heads), "  GB/s    error")
    for row in rows:
        times = (f"{row.get(each, float('nan')):>9.2f}" for each in columns)
        print(
            *(f"{row['shape']:<14}{row['tokens']:>7}", *times),
            f"{row['ours_gb_s']:>6} {row['ours_error']:>8.5f}",
        )


def main() -> int:
    """Print the table and the source; 1 if any result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=90, help="of all, compiling included")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--in-blocks", action="store_true", help="with a scale per block")
    parser.add_argument("--dry-run", action="store_true", help="list what would be tried")
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds - GUARD_S
    if given.dry_run:
        for name in given.shapes:
            outputs, inputs, _ = SHAPES[name]
            counts = [
                len(list(tilings(bucket, outputs, inputs, in_blocks=given.in_blocks)))
                for bucket in BUCKETS
            ]
            print(name, "tilings by bucket:", dict(zip(BUCKETS, counts, strict=True)))
        print("kernels to compile:", len(to_compile(given.shapes, in_blocks=given.in_blocks)))
        return 0
    with torch.inference_mode():
        result = sweep(given.shapes, deadline, given.jobs, given.in_blocks)
    result |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1, default=astuple))
    print_table(result["rows"])
    print(source_of(result["tuned"], given.in_blocks))
    if result["left_out"]:
        print("no time was left for:", *result["left_out"])
    wrong = [row for row in result["tuned"] if row["wrong"]]
    wrong += [
        row
        for row in result["rows"]
        if not max(row["ours_error"], row["early_error"]) < ERROR_MAX or row.get("early_differs")
    ]
    for row in wrong:
        print("WRONG:", row)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
