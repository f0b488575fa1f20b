"""aileron's modes against static vLLM on the same GPUs, model and load, one after the other.

`python -m tests.bench.gpu --shape llama-3-8b --ranks 2 --out DIR` measures TTFT of a 4,096-token
prompt, TPOT of one stream and throughput of a batch, for static tp 1 and tp k and for dp and tp-k
of one cell, then the phases of switches between them. Weights are dummies: only speed counts.
"""

import argparse
import asyncio
import datetime
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


def static_in_child(shape: str, tp: int) -> dict[str, float]:
    """Measure plain vLLM in a process of its own, so that it leaves the GPUs when it ends."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.gpu", "--shape", shape, "--static", str(tp)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"static vLLM with tp {tp} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def table(results: dict[str, Any]) -> list[str]:
    """Markdown: each mode beside the static vLLM of its width, and the switches."""
    ranks = results["ranks"]
    rows = [
        "| | TTFT of 4,096 tokens, ms | TPOT of one stream, ms | 64 x (1,024 + 128): tokens/s |",
        "|---|---|---|---|",
    ]
    for name in ("static tp1", f"static tp{ranks}", f"dp{ranks}", f"tp{ranks}"):
        row = results[name] if name.startswith("static") else results["aileron"][name]
        shown = name if name.startswith("static") else f"aileron {name}"
        ttft, tpot = row["ttft_ms"], row["tpot_ms"]
        rows.append(f"| {shown} | {ttft:.1f} | {tpot:.2f} | {row['batch_tokens_per_s']:.0f} |")
    records = results["aileron"]["switches"]
    for phase in ("park_ms", "swap_ms", "first_step_ms", "total_ms"):
        values = [record[phase] for record in records]
        middle, worst = statistics.median(values), max(values)
        rows.append(f"\nSwitch of idle ranks, {phase}: median {middle:.2f}, worst {worst:.2f}.")
    rows.append(f"\nMemory of rank 0 in bytes: {results['aileron']['memory']}.")
    return rows


def main() -> None:
    """Measure, print, and leave a dated JSON file and table."""
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
        os._exit(0)  # vLLM's engine threads would keep the process.
    cell = folder / "cell"
    cell.mkdir()
    results: dict[str, Any] = {"shape": options.shape, "ranks": options.ranks}
    results["aileron"] = asyncio.run(ours(model, options.ranks, cell))
    for tp in (1, options.ranks):
        results[f"static tp{tp}"] = static_in_child(options.shape, tp)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[0]
    text = [
        f"# aileron's modes against static vLLM, {options.shape} shape, {today}",
        "",
        f"Command: `python -m tests.bench.gpu --shape {options.shape} --ranks {options.ranks}`, "
        f"commit {commit()}, {options.ranks} x {gpu}.",
        "Dummy bf16 weights, full CUDA graphs for decode, no compilation; one server after the "
        "other on the same GPUs.",
        "",
        *table(results),
    ]
    name = options.out / f"{today}-gpu-{options.shape}-{options.ranks}"
    name.with_suffix(".md").write_text("\n".join(text) + "\n")
    name.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(text), flush=True)


def commit() -> str:
    """The commit that is measured, as far as git knows."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or os.environ.get("COMMIT", "unknown")


if __name__ == "__main__":
    main()
