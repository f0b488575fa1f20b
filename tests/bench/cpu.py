"""aileron in dp1 against plain `vllm serve`: same CPU, model and load, interleaved in one run.

Three servers run side by side and are loaded in turn, so that noise of the machine meets all of
them alike: vLLM with plain linear layers (the fair peer: views exclude prepacking), vLLM as it
comes (prepacked), and aileron with one rank. `python -m tests.bench.cpu [--rounds N]`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.harness.cells.servers import (
    COMPUTE_THREADS,
    ROOT,
    aileron_command,
    free_port,
    running,
    vllm_command,
)
from tests.harness.runs.provenance import commit, cores_and_processor, today

OPTIONS = [
    *("--max-model-len", "2048", "--block-size", "32", "--max-num-seqs", "32"),
    *("--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager", "--dtype", "bfloat16"),
]
UNPACKED = ["--worker-cls", "tests.bench.unpacked_worker.UnpackedWorker"]
PEER, PACKED, OURS = "vllm unpacked", "vllm prepacked", "aileron dp1"
LOADS = {
    "throughput": ["--concurrency", "8", "--requests", "48"],
    "latency": ["--concurrency", "1", "--requests", "16"],
}
METRICS = {
    "tokens/s, 8 at once": ("throughput", ("throughput", "output_tokens_per_s"), True),
    "TTFT p50 ms, 8 at once": ("throughput", ("ttft_ms", "p50"), False),
    "TTFT p50 ms, one at a time": ("latency", ("ttft_ms", "p50"), False),
    "TPOT p50 ms, one at a time": ("latency", ("tpot_ms", "p50"), False),
}


def load(url: str, options: list[str], seed: int) -> dict[str, Any]:
    """One loadgen run; returns its totals."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [
            *(sys.executable, "-m", "loadgen", "run", "--url", url, "--quiet"),
            *("--endpoint", "completions", "--prompt-tokens", "fixed:128"),
            *("--output-tokens", "fixed:64", "--ignore-eos", "--temperature", "0"),
            *("--warmup-requests", "2", "--seed", str(seed), "--out", out.name, *options),
        ]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
        total: dict[str, Any] = json.loads(Path(out.name).read_text())["total"]
    failed = {name: count for name, count in total["errors"].items() if count}
    if failed:
        raise RuntimeError(f"{url}: requests failed: {failed}")
    return total


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Metric -> server -> one value per round."""
    ports = {name: free_port() for name in (PEER, PACKED, OURS)}
    commands = {
        PEER: vllm_command(ports[PEER], [*OPTIONS, *UNPACKED]),
        PACKED: vllm_command(ports[PACKED], OPTIONS),
        OURS: aileron_command(ports[OURS], 1, OPTIONS),
    }
    values: dict[str, dict[str, list[float]]] = {m: {n: [] for n in ports} for m in METRICS}
    with ExitStack() as stack:
        urls = {}
        for name, command in commands.items():
            path = "/ready" if name == OURS else "/health"
            print(f"starting {name}", flush=True)
            urls[name] = stack.enter_context(running(command, ports[name], path))
        for number in range(rounds):
            order = list(urls) if number % 2 == 0 else list(reversed(urls))
            for name in order:
                totals = {k: load(urls[name], options, number) for k, options in LOADS.items()}
                for metric, (kind, path_, _) in METRICS.items():
                    value: Any = totals[kind]
                    for key in path_:
                        value = value[key]
                    values[metric][name].append(float(value))
            print(f"round {number + 1} of {rounds}", flush=True)
    return values


def table(values: dict[str, dict[str, list[float]]]) -> list[str]:
    """Markdown rows of medians, and ours relative to the fair peer (above 1 is better)."""
    rows = [
        f"| metric (median) | {PEER} | {PACKED} | {OURS} | ours / unpacked, >1 is better |",
        "|---|---|---|---|---|",
    ]
    for metric, (_, _, higher_is_better) in METRICS.items():
        medians = {name: statistics.median(values[metric][name]) for name in values[metric]}
        ratio = medians[OURS] / medians[PEER]
        better = ratio if higher_is_better else 1 / ratio
        cells = " | ".join(f"{medians[name]:.1f}" for name in (PEER, PACKED, OURS))
        rows.append(f"| {metric} | {cells} | {better:.3f} |")
    return rows


def main() -> None:
    """Measure, print, and leave a dated JSON file and table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    values = measure(rounds)
    measured, date = commit(), today()
    hardware = cores_and_processor()
    folder = ROOT / "docs" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    text = [
        f"# aileron dp1 against `vllm serve` on CPU, {date}",
        "",
        f"Command: `make bench` (`python -m tests.bench.cpu --rounds {rounds}`), "
        f"commit {measured}, {hardware}.",
        "Demo model in bf16, eager, prompts of 128 and answers of 64 tokens; the three servers run "
        f"side by side and are loaded in turn, {rounds} rounds.",
        f"Each server computes with {COMPUTE_THREADS} thread(s).",
        f"Engine options of all three: `{' '.join(OPTIONS)}`.",
        "",
        *table(values),
    ]
    name = folder / f"{date}-cpu-dp1"
    name.with_suffix(".md").write_text("\n".join(text) + "\n")
    record = {"date": date, "commit": measured, "hardware": hardware, "rounds": rounds}
    name.with_suffix(".json").write_text(json.dumps({**record, "values": values}, indent=1) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
