"""Turns the options of `aileron up` into one checked configuration.

Decides only: hardware and free ports are arguments. A `--config` file is the base, options override
it, and this machine's defaults fill the rest.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comm_pool.mixed import shape_of_parts
from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.protocol.config import Config, ConfigError, check_config, load_config

DEMO_MODEL = Path(__file__).resolve().parents[2] / "worker" / "demo" / "model"
DEMO_NAME = "aileron-demo"
DEMO_ENGINE_ARGS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "granite4"),
    *(
        "--structured-outputs-config",
        '{"backend":"xgrammar","disable_any_whitespace":true}',
    ),
)
"""vLLM options that let the bundled model answer with tools and with short JSON."""
CPU_RANKS = 2
"""Ranks on a machine without GPUs; more would only share the same cores."""

GATEWAYS_PER_RANK = 2
"""Gateway processes for each GPU. One streams about 9,000 tokens a second, and two H200s make more
than that of an 8B model: the first token then waits for the gateway."""
CORES_PER_GATEWAY = 4
"""A core is for a gateway where the machine has this many for it; ranks need most of them."""
MEMORY = "memory://"

OWN_OPTIONS = {
    "--model": "--model before the --",
    "--tensor-parallel-size": "--ranks, --widths and --layout",
    "-tp": "--ranks, --widths and --layout",
    "--data-parallel-size": "--ranks and --layout",
    "-dp": "--ranks and --layout",
    "--api-key": "--keys before the --",
    "--host": "--host before the --",
    "--port": "--port before the --",
    "--served-model-name": "model.served_name in a --config FILE",
}
"""vLLM options that aileron decides itself -> what to use instead."""


SETTINGS = {
    "gateway.port": "--port",
    "gateway.host": "--host",
    "gateway.processes": "--gateways",
    "gateway.keys_file": "--keys",
    "admin.port": "--admin-port",
    "cell.ranks_per_device": "--ranks-per-device",
    "cell.ranks": "--ranks",
    "cell.widths": "--widths",
    "cell.layout": "--layout",
    "cell.mixed": "--mixed",
    "cell.pipelines": "--pipelines",
    "cell.weight_parts": "--weight-parts",
    "cell.whole_layers": "--whole-layers",
    "cell.host_kv_gib": "--host-kv",
}
"""Settings that options set -> these options."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine's values that complete the options."""

    gpus: int
    free_ports: tuple[int, int, int, int]
    """For gRPC, for torch's rendezvous, and for serving and admin if they ask for any free port."""
    run_dir: str
    state_dir: str
    """This user's folder for data that outlives a run; empty where it cannot be written."""
    cores: int = 1
    """How many the processes of the cell may use."""


def build_config(options: argparse.Namespace, machine: Machine) -> Config:
    """Return the configuration of every process; raises `CliError` with one sentence."""
    try:
        file = load_config(options.config) if options.config else None
    except ConfigError as error:
        raise CliError(str(error), USAGE_STATUS) from error
    base = _empty() if file is None else file.model_dump()
    _set_model(base["model"], options)
    _set_cell(base["cell"], options, machine, from_file=options.config is not None)
    _set_policy(base["policy"], options)
    if options.precopy is not None:
        base.setdefault("coordinator", {})["precopy"] = options.precopy
    _set_addresses(base, options, machine.free_ports)
    if options.gateways is not None:
        base["gateway"]["processes"] = options.gateways
    elif file is None or "processes" not in file.gateway.model_fields_set:
        base["gateway"]["processes"] = _usual_gateways(base["cell"], base["gateway"], machine.cores)
    _set_log(base, options)
    base["run_dir"] = base.get("run_dir") or machine.run_dir
    try:
        return _with_data_dir(check_config(base), machine.state_dir)
    except ConfigError as error:
        raise CliError(_in_options(str(error), options), USAGE_STATUS) from error


def _in_options(sentence: str, options: argparse.Namespace) -> str:
    """Name the option that was given where a sentence begins with the setting that it sets."""
    for setting, name in SETTINGS.items():
        is_given = getattr(options, name.strip("-").replace("-", "_"), None) is not None
        if is_given and re.match(rf"{re.escape(setting)}\b", sentence):
            return name + sentence.removeprefix(setting)
    return sentence


def _with_data_dir(config: Config, state_dir: str) -> Config:
    if config.batches.data_dir or not state_dir:
        return config
    # By model: only a cell that serves its model can run a batch.
    name = re.sub(r"[^A-Za-z0-9._-]", "_", config.served_model_name)
    batches = config.batches.model_copy(
        update={"data_dir": str(Path(state_dir) / "batches" / name)}
    )
    return config.model_copy(update={"batches": batches})


def _empty() -> dict[str, Any]:
    names = ("model", "cell", "coordinator", "policy", "gateway", "batches", "admin")
    return {section: {} for section in names}


def _set_model(model: dict[str, Any], options: argparse.Namespace) -> None:
    if options.model is not None:
        model["path"], model["served_name"] = options.model, ""
        if options.served_names:
            model["served_name"], *model["other_names"] = options.served_names
    elif not model.get("path"):
        if not (DEMO_MODEL / "config.json").exists():
            raise CliError(
                f"the demo model is not installed at {DEMO_MODEL}: name a model with --model.",
                USAGE_STATUS,
            )
        model["path"], model["served_name"] = str(DEMO_MODEL), DEMO_NAME
        model["engine_args"] = (*DEMO_ENGINE_ARGS, *model.get("engine_args", ()))
    _refuse_own_options(options.engine_args)
    model["engine_args"] = (*model.get("engine_args", ()), *options.engine_args)


def _refuse_own_options(engine_args: Sequence[str]) -> None:
    for argument in engine_args:
        name = argument.split("=", 1)[0].replace("_", "-")
        if name in OWN_OPTIONS:
            raise CliError(
                f"aileron sets {name} for vLLM itself: use {OWN_OPTIONS[name]}.",
                USAGE_STATUS,
            )


def _set_cell(
    cell: dict[str, Any], options: argparse.Namespace, machine: Machine, *, from_file: bool
) -> None:
    if options.device == "cuda" and not machine.gpus:
        raise CliError(
            "--device cuda, but nvidia-smi lists no GPU: install the driver or use --device cpu.",
            USAGE_STATUS,
        )
    if options.device in ("cpu", "cuda"):
        cell["device"] = options.device
    elif not from_file or options.device == "auto":
        cell["device"] = "cuda" if machine.gpus else "cpu"
    ranks_before = cell.get("ranks")
    if options.ranks is not None:
        if options.ranks < 1:
            raise CliError(f"--ranks {options.ranks}: use at least one rank.", USAGE_STATUS)
        cell["ranks"] = options.ranks
    elif not from_file:
        cell["ranks"] = machine.gpus if cell["device"] == "cuda" else CPU_RANKS
    ranks: int = cell["ranks"]
    if options.ranks_per_device is not None:
        cell["ranks_per_device"] = options.ranks_per_device
        if options.ranks_per_device > 1 and cell["device"] == "cpu":
            raise CliError(
                f"--ranks-per-device {options.ranks_per_device}: only GPUs are shared so, and the "
                "ranks are on the CPU, whose cores they share anyway: leave it out.",
                USAGE_STATUS,
            )
    needed = -(-ranks // max(1, cell.get("ranks_per_device", 1)))
    if cell["device"] == "cuda" and needed > machine.gpus:
        raise CliError(
            f"{ranks} ranks need {needed} GPUs, but nvidia-smi lists {machine.gpus}: lower "
            "--ranks, or let ranks share GPUs with --ranks-per-device.",
            USAGE_STATUS,
        )
    _set_groups(cell, options, ranks, changed=ranks != ranks_before)


def _set_groups(
    cell: dict[str, Any], options: argparse.Namespace, ranks: int, *, changed: bool
) -> None:
    """Set the possible groups; those of a file hold only for its number of ranks."""
    if options.widths is not None:
        cell["widths"] = _read_widths(options.widths, ranks)
    elif changed:
        cell["widths"] = tuple(each for each in _powers_of_two(ranks) if ranks % each == 0)
    for setting in ("mixed", "pipelines"):
        if (named := getattr(options, setting)) is not None:
            cell[setting] = named.split(",")
        elif changed:
            cell[setting] = ()
    if options.weight_parts is not None:
        cell["weight_parts"] = options.weight_parts
    if options.borrow is not None:
        cell["borrow"] = options.borrow
    if options.whole_layers is not None:
        cell["whole_layers"] = options.whole_layers
    if options.host_kv is not None:
        cell["host_kv_gib"] = options.host_kv
    if options.layout is not None:
        cell["layout"] = options.layout
    elif changed or options.weight_parts is not None:
        cell["layout"] = _first_layout(cell, ranks)


def _first_layout(cell: Mapping[str, Any], ranks: int) -> str:
    """Every rank alone; if each holds a part of the weights, groups that hold all parts."""
    parts, widest = cell.get("weight_parts", 1), max(cell["widths"])
    if parts <= 1 or widest % parts:
        return f"dp{ranks}"
    held = shape_of_parts(widest, parts)
    group = f"tp{widest}" if held is None else f"shift{held.sp}tp{held.tp}"
    return "+".join([group] * (ranks // widest))


def _set_policy(policy: dict[str, Any], options: argparse.Namespace) -> None:
    if options.policy is not None:
        policy["name"] = options.policy
    if options.step_times is not None:
        policy["step_times"] = str(options.step_times.absolute())
    if options.observation_log is not None:
        policy["observation_log"] = str(options.observation_log.absolute())
    name = policy.get("name", "fixed")
    if name == "fixed" and (options.step_times or options.observation_log):
        raise CliError(
            "--step-times and --observation-log belong to --policy adaptive: add it.", USAGE_STATUS
        )


def _set_log(base: dict[str, Any], options: argparse.Namespace) -> None:
    given = {"level": options.log_level, "format": options.log_format}
    for name, value in given.items():
        if value is not None:
            base.setdefault("log", {})[name] = value


def _set_addresses(
    base: dict[str, Any], options: argparse.Namespace, free: tuple[int, int, int, int]
) -> None:
    grpc, rendezvous, serving, admin = free
    if options.config is None:
        base["coordinator"]["listen"] = f"127.0.0.1:{grpc}"
    base["cell"]["dist_port"] = base["cell"].get("dist_port") or rendezvous
    if options.host is not None:
        base["gateway"]["host"] = options.host
    if options.keys is not None:
        base["gateway"]["keys_file"] = str(options.keys.absolute())
    if options.insecure_no_auth:
        base["gateway"]["insecure_no_auth"] = True
    for section, wanted, any_free in (
        ("gateway", options.port, serving),
        ("admin", options.admin_port, admin),
    ):
        port = base[section].get("port") if wanted is None else wanted
        if port is not None:
            base[section]["port"] = port or any_free


def _usual_gateways(cell: Mapping[str, Any], gateway: Mapping[str, Any], cores: int) -> int:
    """Return the number of gateway processes: more than one only where nothing speaks against it.

    Without Redis each process would count a key's requests for itself. Several processes cannot
    listen on one port for tokens, and take several ports for metrics.
    """
    counts = gateway.get("keys_file") and gateway.get("rate_limit_storage", MEMORY) == MEMORY
    has_address = not gateway.get("token_listen", ":0").endswith(":0")
    if cell["device"] != "cuda" or counts or has_address or gateway.get("metrics_listen"):
        return 1
    ranks: int = cell["ranks"]
    return max(1, min(GATEWAYS_PER_RANK * ranks, cores // CORES_PER_GATEWAY))


def _powers_of_two(upto: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(upto.bit_length()))


def _read_widths(text: str, ranks: int) -> tuple[int, ...]:
    supported = _powers_of_two(ranks)
    try:
        widths = {int(part) for part in text.split(",")}
    except ValueError:
        raise CliError(
            f"--widths '{text}' is no list of numbers: use one such as 1,2,4.", USAGE_STATUS
        ) from None
    unusable = sorted(widths.difference(supported))
    if unusable:
        raise CliError(
            f"--widths {text}: {unusable[0]} is no power of two between 1 and {ranks} (--ranks).",
            USAGE_STATUS,
        )
    return tuple(sorted({1, *widths}))
