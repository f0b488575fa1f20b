"""aileron's modes against static vLLM on the same GPUs, model and load, one after the other.

`python -m tests.bench.gpu --shape llama-3-8b --ranks 2 --out DIR` measures TTFT of a 4,096-token
prompt, TPOT of one stream and throughput of a batch, for static tp 1 and tp k and for dp and tp-k
of one cell, then the phases of switches between them. Weights are dummies: only speed counts.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.gpu_shapes import write_shape
from tests.bench.servers import ROOT

PROMPT_TOKENS = 4096
STREAM_TOKENS = 200
BATCH, BATCH_PROMPT, BATCH_TOKENS = 64, 1024, 128
REPEATS = 5
SWITCHES = 20
ENGINE = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 16384,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.6,
    "enable_prefix_caching": False,
}


def prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(range(10, 100_000), k=tokens)


def engine_args() -> list[str]:
    """`ENGINE` as command-line options."""
    arguments: list[str] = []
    for name, value in ENGINE.items():
        option = name.replace("_", "-")
        if value is False:
            arguments.append(f"--no-{option}")
        else:
            arguments += [f"--{option}"] + ([] if value is True else [str(value)])
    return arguments


def static(model: Path, tp: int) -> dict[str, float]:
    """Measure plain vLLM in this process."""
    return asyncio.run(_static(model, tp))


async def _static(model: Path, tp: int) -> dict[str, float]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    arguments = AsyncEngineArgs(
        model=str(model), tensor_parallel_size=tp, compilation_config=graphs, **ENGINE
    )
    engine = AsyncLLM.from_engine_args(arguments)

    async def one(name: str, ids: list[int], tokens: int) -> list[float]:
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        times = [time.perf_counter()]
        async for _ in engine.generate({"prompt_token_ids": ids}, params, name):
            times.append(time.perf_counter())
        return times

    try:
        return await measure(one)
    finally:
        engine.shutdown()


async def measure(one: Any) -> dict[str, float]:
    """From `one(name, ids, tokens)` -> [sent, token times…] to numbers in ms."""
    await one("warm", prompt(PROMPT_TOKENS, 0), 16)
    ttft = []
    for turn in range(REPEATS):
        times = await one(f"first-{turn}", prompt(PROMPT_TOKENS, turn + 1), 1)
        ttft.append((times[1] - times[0]) * 1e3)
    tpot = []
    for turn in range(3):
        times = await one(f"stream-{turn}", prompt(1024, turn + 50), STREAM_TOKENS)
        tpot.append((times[-1] - times[1]) / (STREAM_TOKENS - 1) * 1e3)
    started = time.perf_counter()
    names = [(f"batch-{i}", prompt(BATCH_PROMPT, i + 100)) for i in range(BATCH)]
    await asyncio.gather(*(one(name, ids, BATCH_TOKENS) for name, ids in names))
    took = time.perf_counter() - started
    return {
        "ttft_ms": statistics.median(ttft),
        "tpot_ms": statistics.median(tpot),
        "batch_tokens_per_s": BATCH * BATCH_TOKENS / took,
    }


async def ours(model: Path, ranks: int, folder: Path) -> dict[str, Any]:
    """Measure every mode of one cell, then its switches."""
    from tests.harness.bare_cell import TaskClient, bare_cell

    results: dict[str, Any] = {}
    with bare_cell(
        folder, ranks=ranks, engine_args=engine_args(), model=model, device="cuda"
    ) as cell:
        results["memory"] = cell.get("/admin/ranks")["ranks"][0]["memory"]
        client = TaskClient()
        async with client.connected(cell):
            for layout in (f"dp{ranks}", f"tp{ranks}"):
                await asyncio.to_thread(cell.switch, layout, "recompute")

                async def one(
                    name: str, ids: list[int], tokens: int, layout: str = layout
                ) -> list[float]:
                    return await client.timed(f"{layout}-{name}", ids, max_tokens=tokens)

                results[layout] = await measure(one)
                print("aileron", layout, results[layout], flush=True)
            for turn in range(SWITCHES):
                layout = (f"dp{ranks}", f"tp{ranks}")[turn % 2]
                await asyncio.to_thread(cell.switch, layout, "pause")
                await client.timed(f"after-{turn}", prompt(64, turn), max_tokens=4)
        results["switches"] = cell.get(f"/admin/switches?last={SWITCHES}")["switches"]
    return results


def main() -> None:
    """Measure, print and write `gpu.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--static", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpu-bench-"))
    model = write_shape(options.shape, folder)
    if options.static:
        print("RESULT " + json.dumps(static(model, options.static)), flush=True)
        os._exit(0)
    cell = folder / "cell"
    cell.mkdir()
    results: dict[str, Any] = {"shape": options.shape, "ranks": options.ranks}
    try:
        results["aileron"] = asyncio.run(ours(model, options.ranks, cell))
    finally:
        for log in cell.glob("*.log"):
            (options.out / f"gpu-{log.name}").write_text(log.read_text()[-200_000:])
    for tp in (1, options.ranks):
        command = [sys.executable, "-m", "tests.bench.gpu", "--static", str(tp)]
        done = subprocess.run(
            [*command, "--shape", options.shape],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        results[f"static tp{tp}"] = json.loads(lines[-1][7:]) if lines else done.stderr[-3000:]
        print("static", tp, results[f"static tp{tp}"], flush=True)
    (options.out / "gpu.json").write_text(json.dumps(results, indent=1))
    print(json.dumps({k: v for k, v in results.items() if k != "switches"}, indent=1)[:4000])


if __name__ == "__main__":
    main()
