"""Times and checks one layer's way from the qkv GEMM to attention, on one NVIDIA GPU.

`python -m tests.bench.kernel_reorder [--warps 4 8]` prints JSON: microseconds per layer of plain
vLLM (natural rows, norm, RoPE), of the separate reorder in front of that, and of the fused kernel,
in CUDA graphs, and for prompts also launched plainly. Exit status 1 if a bit differs from vLLM.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from vllm import _custom_ops as ops

from tests.bench.graph_time import replay_us
from worker.engine.weights.reorder import reorder_qkv
from worker.engine.weights.rope_kernel import rotate_shards

SHARDS = 4
HEAD_DIM = 128
MAX_POSITION = 32768
EPSILON = 1e-6
SHAPES = {"8b": (32, 8, False), "32b": (64, 8, True), "70b": (64, 8, False)}
"""Query heads, KV heads, whether q and k are normed; 70b with one rank's whole replica."""
DECODE_TOKENS = (1, 16, 64, 256)
PROMPT_TOKENS = (4096, 8192)
LAUNCHES = 32
"""Layers in a graph: a replay costs the host one launch, and the time of one layer is its share."""
REPEATS = 20
POOL_BYTES = 256 << 20
"""Rows of a prompt are taken in turn from so many bytes, more than the cache holds."""


class Layer:
    """One layer's inputs, and the three ways to prepare q, k and v for attention."""

    def __init__(self, name: str, tokens: int) -> None:
        q_heads, kv_heads, self.normed = SHAPES[name]
        self.heads = (q_heads // SHARDS, kv_heads // SHARDS)
        self.sizes = (q_heads * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM)
        width = sum(self.sizes)
        copies = min(LAUNCHES, max(1, POOL_BYTES // (tokens * width * 2)))
        make = {"device": "cuda", "dtype": torch.bfloat16}
        self.rows = [torch.randn(tokens, width, **make) for _ in range(copies)]
        self.positions = torch.randint(0, MAX_POSITION, (tokens,), device="cuda")
        angle = torch.rand(MAX_POSITION, HEAD_DIM // 2, device="cuda") * 6.3
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], -1).to(torch.bfloat16)
        self.weights = [torch.randn(HEAD_DIM, **make) for _ in range(2)]

    def stock(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What vLLM launches for natural rows."""
        q, k, v = rows.split(self.sizes, -1)
        if self.normed:
            q, k = self._norm(q, self.weights[0]), self._norm(k, self.weights[1])
        ops.rotary_embedding(self.positions, q, k, HEAD_DIM, self.cos_sin, True)
        return q, k, v

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        by_head = x.view(x.shape[0], -1, HEAD_DIM)
        out = torch.empty(by_head.shape, dtype=x.dtype, device=x.device)
        ops.rms_norm(out, by_head, weight, EPSILON)
        return out.view(x.shape)

    def separate(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The reorder as a kernel of its own, then vLLM's."""
        size = HEAD_DIM * self.heads[0], HEAD_DIM * self.heads[1]
        return self.stock(reorder_qkv(rows, SHARDS, *size))

    def fused(self, rows: torch.Tensor, warps: int | None = None) -> tuple[torch.Tensor, ...]:
        """One kernel in place."""
        q, k, v = rows.split(self.sizes, -1)
        rotate_shards(
            q,
            self.positions,
            self.cos_sin,
            shards=SHARDS,
            heads=self.heads,
            head_dim=HEAD_DIM,
            norm=(self.weights[0], self.weights[1], EPSILON) if self.normed else None,
            warps=warps,
        )
        return q, k, v

    def differing(self, warps: int | None) -> dict[str, int]:
        """Elements in which the fused kernel's q, k and v differ from vLLM's, by name."""
        rows = self.rows[0]
        vllms = self.separate(rows.clone())
        ours = self.fused(rows.clone(), warps)
        counts = {}
        for name, a, b in zip("qkv", ours, vllms, strict=True):
            counts[name] = int((a.reshape_as(b).view(torch.int16) != b.view(torch.int16)).sum())
        return counts


def microseconds(step: Callable[[torch.Tensor], Any], layer: Layer, *, graph: bool) -> float:
    """Median device time of one layer; LAUNCHES layers go between two events."""

    def layers() -> None:
        for number in range(LAUNCHES):
            step(layer.rows[number % len(layer.rows)])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # Compiles, and warms what a capture must not allocate.
        layers()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    run = layers
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            layers()
        run = captured.replay
    run()
    return round(replay_us(run, LAUNCHES, REPEATS), 3)


def measure(name: str, tokens: int, warps: list[int]) -> dict[str, Any]:
    """All ways for one shape and number of tokens."""
    layer = Layer(name, tokens)
    row: dict[str, Any] = {"shape": name, "tokens": tokens, "differing": layer.differing(None)}
    ways = {"stock": layer.stock, "separate": layer.separate, "fused": layer.fused}
    step: Callable[..., Any]
    for way, step in ways.items():
        row[f"{way}_us"] = microseconds(step, layer, graph=True)
        if tokens in PROMPT_TOKENS:
            row[f"{way}_plain_us"] = microseconds(step, layer, graph=False)
    for count in warps:
        row[f"differing_{count}_warps"] = layer.differing(count)
        step = functools.partial(layer.fused, warps=count)
        row[f"fused_{count}_warps_us"] = microseconds(step, layer, graph=True)
    return row


def main() -> int:
    """Print one JSON object; 1 if any element differs from vLLM's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warps", type=int, nargs="*", default=[], help="further warps to try")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for name in SHAPES:
            for tokens in (*DECODE_TOKENS, *PROMPT_TOKENS):
                rows.append(measure(name, tokens, arguments.warps))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    gpu = torch.cuda.get_device_name()
    print(json.dumps({"gpu": gpu, "torch": torch.__version__, "rows": rows}, indent=1))
    differing = sum(
        count
        for row in rows
        for key, counts in row.items()
        if key.startswith("differing")
        for count in counts.values()
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
