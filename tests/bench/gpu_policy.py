"""Named workloads over HTTP: the adaptive policy beside static vLLM in every fixed layout.

`python -m tests.bench.gpu_policy --shape llama-3-70b-fp8 --ranks 4 --out DIR`: one server after the
other on the same GPUs gets the same requests at the same times. Static vLLM runs twice: on equal
terms, and as `vllm serve` with its own defaults (compiled, prefix caching, its own batch limits),
of which only memory, context and weights are set. `--only` names some servers, for a
machine that is lent for a short while; `--report A.json B.json` puts such parts together.
`--shape demo --device cpu` tries all of it without a GPU.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.bench.gpu import hardware, versions
from tests.bench.gpu_policy_report import write_policy_report
from tests.bench.gpu_servers import gpu_memory_mib, wait_gpus_free
from tests.bench.gpu_shapes import COMPILATION, DEMO, as_arguments, engine_options, write_shape
from tests.harness.cells.servers import MODEL, ROOT, environment, free_port, running
from tests.harness.runs.provenance import commit, today

LOAD_LIMIT_S = 900
START_LIMIT_S = 480
"""Four ranks of a 32B model measure seven modes before they serve."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
WARM = ("--concurrency", "8", "--requests", "32", "--output-tokens", "fixed:32")


DEFAULTS = ", defaults"
"""End of the name of a server that runs as `vllm serve` with its own defaults."""

EVIDENCE = ("decisions", "step_times", "out_of_service", "ranks", "gateways")
"""What the report stores of the admin API's answers on decisions and status."""

SET_FOR_DEFAULTS = ("load_format", "max_model_len", "gpu_memory_utilization", "quantization")


def servers(ranks: int) -> dict[str, dict[str, int]]:
    """Name -> vLLM's parallel sizes; aileron has none of its own."""
    static = {f"dp{ranks}": (ranks, 1), f"tp{ranks}": (1, ranks)}
    if ranks == 4:
        static["2 x tp2"] = (2, 2)
    sizes = {
        f"static {name}": {"data_parallel_size": dp, "tensor_parallel_size": tp}
        for name, (dp, tp) in static.items()
    }
    defaults = {f"{name}{DEFAULTS}": each for name, each in sizes.items()}
    return {"aileron": {}, **sizes, **defaults}


def shaped_model(shape: str, folder: Path) -> Path:
    """A folder of that shape with the demo's tokenizer, since an HTTP server reads and tells text.

    Only embedding and output layer shrink with the vocabulary.
    """
    model = write_shape(shape, folder)
    if shape == DEMO:
        return model
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    (model / "config.json").write_text(json.dumps(config, indent=1))
    for name in TOKENIZER_FILES:
        shutil.copy(MODEL / name, model / name)
    return model


def command_of(name: str, model: Path, options: argparse.Namespace, port: int, admin: int) -> Any:
    """The command line of one server."""
    engine = engine_options(options.shape, options.device, options.memory_share)
    del engine["skip_tokenizer_init"]
    if options.device == "cuda":
        engine["compilation_config"] = COMPILATION
    if name == "aileron":
        log = options.observations
        return [
            *(sys.executable, "-m", "coordinator.cli", "up", "--model", str(model)),
            *("--ranks", str(options.ranks), "--device", options.device),
            *("--policy", "adaptive", "--port", str(port), "--admin-port", str(admin)),
            *(() if log is None else ("--observation-log", str(log.absolute()))),
            *(() if options.gateways is None else ("--gateways", str(options.gateways))),
            *("--", *as_arguments(engine)),
        ]
    program = "from vllm.entrypoints.cli.main import main; main()"
    sizes = as_arguments(servers(options.ranks)[name])
    if name.endswith(DEFAULTS):
        engine = {key: engine[key] for key in SET_FOR_DEFAULTS if key in engine}
        if options.device == "cpu":
            engine["max_model_len"] = 512
    address = ["--host", "127.0.0.1", "--port", str(port)]
    shared = as_arguments(engine)
    return [sys.executable, "-c", program, "serve", str(model), *address, *sizes, *shared]


def load(url: str, options: list[str], out: Path) -> dict[str, Any]:
    """One run of the load generator; returns its report."""
    command = [
        *(sys.executable, "-m", "loadgen", "run", "--url", url, "--quiet", "--ignore-eos"),
        *("--prompt-kind", "tokens", "--vocab-size", "4000", "--temperature", "0"),
        *("--out", str(out), *options),
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LOAD_LIMIT_S)
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def policy_evidence(admin: int) -> dict[str, Any]:
    """What the policy decided so far and why, changes or not, and what it knew of its cell."""
    found: dict[str, Any] = {}
    for name in ("decisions?last=1000", "status"):
        with urlopen(f"http://127.0.0.1:{admin}/admin/{name}", timeout=10) as answer:
            found |= json.load(answer)
    return {name: found[name] for name in EVIDENCE}


def served(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The reports of all presets on one server."""
    port, admin = free_port(), free_port()
    is_ours = name == "aileron"
    command = command_of(name, model, options, port, admin)
    surroundings = dict(os.environ) if options.device == "cuda" else environment()
    found: dict[str, Any] = {}
    print(f"{name}: starts", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        ready = "/ready" if is_ours else "/health"
        with running(
            command, port, ready, surroundings=surroundings, start_limit_s=START_LIMIT_S
        ) as url:
            length = ["--length-scale", str(options.length_scale)]
            load(url, [*WARM, "--prompt-tokens", f"fixed:{options.warm_tokens}"], out)
            for preset in options.presets:
                print(f"{name}: {preset}", flush=True)
                shaped = ["--preset", preset, "--duration", str(options.duration), *length]
                shaped += ["--rate-scale", str(options.rate_scale), "--seed", str(options.seed)]
                if is_ours:
                    shaped += ["--admin-url", f"http://127.0.0.1:{admin}"]
                found[preset] = load(url, shaped, out)
                if is_ours:
                    found[preset] |= policy_evidence(admin)
    return found


def main() -> int:
    """Serve, measure, write; a server that fails is told and leaves the others' results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3-70b-fp8")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--presets", nargs="+", default=["bursty", "priority"])
    parser.add_argument("--duration", type=float, default=378.0, help="of each preset, in seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the presets' requests")
    parser.add_argument("--rate-scale", type=float, default=1.0)
    parser.add_argument("--length-scale", type=float, default=1.0)
    parser.add_argument("--warm-tokens", type=int, default=512, help="of the warm-up's prompts")
    parser.add_argument("--memory-share", type=float, default=0.85)
    parser.add_argument("--gateways", type=int, metavar="N", help="gateway processes of aileron")
    parser.add_argument("--only", nargs="+", default=[], metavar="SERVER")
    parser.add_argument(
        "--observations", type=Path, metavar="FILE", help="what aileron saw, for `aileron replay`"
    )
    parser.add_argument("--report", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    options = parser.parse_args()
    if options.report:
        write_policy_report([json.loads(each.read_text()) for each in options.report], options.out)
        return 0
    results: dict[str, Any] = {
        "date": today(),
        "command": f"python -m tests.bench.gpu_policy {' '.join(sys.argv[1:])}",
        "commit": commit(),
        "hardware": hardware(options.ranks),
        "versions": versions(),
        "shape": options.shape,
        "ranks": options.ranks,
        "servers": {},
        "errors": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        model = shaped_model(options.shape, Path(folder))
        before = gpu_memory_mib()
        for name in options.only or servers(options.ranks):
            try:
                results["servers"][name] = served(name, model, options)
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                results["errors"][name] = str(error)[-2000:]
                print(f"{name}: {error}", flush=True)
            write_policy_report([results], options.out)
            asyncio.run(wait_gpus_free(before))
    return 1 if results["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
