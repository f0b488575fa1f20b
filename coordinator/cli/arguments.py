"""The command line of `aileron`: every command with its options, and nothing else.

A command is a function of the parsed options: those in `runs`, and `doctor`, which parses more.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.cli import runs
from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.cli.parser import Parser, host_kv, whole_layers

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]  # noqa: SLF001 -- it has no public name

TIERS = ("interactive", "standard", "batch")
CARRIES = ("reshard", "pause", "drain", "recompute", "speculate")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("json", "console")
ADMIN_CA_HELP = "PEM file of the authority of an https admin port; default: $AILERON_ADMIN_CA"
WITHOUT_ACTION: tuple[list[str], ...] = ([], ["key"], ["config"])
"""Command lines that ask for nothing, so they get help."""
ADMIN_URL_HELP = "admin API; default: the one of the last `aileron up`, else http://127.0.0.1:8001"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse; the result has `command`, the function to call with it. Raises `CliError`."""
    if arguments and arguments[0] == "serve":
        return _parse_serve(arguments[1:])
    if arguments and arguments[0] == "key" and _is_option(arguments[1:2]):
        # `aileron key --tenant acme`, from before there were other actions.
        arguments = ["key", "new", *arguments[1:]]
    if list(arguments) in WITHOUT_ACTION:
        arguments = [*arguments, "--help"]
    own, engine_args = _split_engine_args(arguments)
    options, unknown = _parser().parse_known_args(own)
    if unknown:
        raise CliError(_advice_on(unknown, _name_of(options)), USAGE_STATUS)
    _settle_model(options)
    takes_them = options.name == "up" or getattr(options, "model", None) is not None
    if engine_args and not takes_them:
        raise CliError(
            "engine options after -- belong to `aileron up`: leave them out here.",
            USAGE_STATUS,
        )
    options.engine_args = tuple(engine_args)
    return options


def _settle_model(options: argparse.Namespace) -> None:
    """Let the model be named as a word or by --model, where a command takes both."""
    word = getattr(options, "model_word", None)
    if word is not None and options.model not in (None, word):
        raise CliError(f"{word} and {options.model}: name one model.", USAGE_STATUS)
    if word is not None:
        options.model = word
    if options.name == "plan" and options.model is None:
        raise CliError("name the model: aileron plan MODEL.", USAGE_STATUS)


def _is_option(words: Sequence[str]) -> bool:
    return any(each.startswith("--") and each != "--help" for each in words)


def _advice_on(unknown: Sequence[str], command: str) -> str:
    """Return the sentence about words that a command does not know."""
    from coordinator.protocol.engine_options import is_known
    from coordinator.protocol.mistakes import proposal

    word = unknown[0].split("=", 1)[0]
    page = f"See `aileron {command} --help`."
    if not word.startswith("-"):
        return f"{word!r} is no option of `aileron {command}`. {page}"
    if command == "up" and is_known(word):
        return f"{word} is an option of vLLM: put it after --, or use `aileron serve`. {page}"
    return f"`aileron {command}` has no option {word}{proposal(word, _names_of(command))} {page}"


def _name_of(options: argparse.Namespace) -> str:
    """Return the words that name the command, such as "up" or "key new"."""
    return f"{options.name} {options.action}" if hasattr(options, "action") else options.name


def _names_of(command: str) -> list[str]:
    """Return the options of a command."""
    parser: argparse.ArgumentParser = _parser()
    for word in command.split():
        for action in parser._actions:  # noqa: SLF001 -- argparse has no public way to ask
            if isinstance(action.choices, dict) and word in action.choices:
                parser = action.choices[word]
    return list(parser._option_string_actions)  # noqa: SLF001


def _parse_serve(words: Sequence[str]) -> argparse.Namespace:
    from coordinator.cli.serve import parse_serve

    parser = Parser(prog="aileron", add_help=False)
    commands = parser.add_subparsers(dest="name", metavar="COMMAND")
    _add_serve(commands)
    return parse_serve(commands.choices["serve"], words, os.environ)


def _split_engine_args(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    given = list(arguments)
    if "--" not in given:
        return given, []
    at = given.index("--")
    return given[:at], given[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="aileron",
        description="LLM serving that changes its parallelism while requests are running.",
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    _add_up(commands)
    _add_serve(commands)
    for name, text in (
        ("gateway", "one gateway process (HTTP)"),
        ("coordinator", "one coordinator process"),
        ("rank", "the rank processes of this host"),
    ):
        one = commands.add_parser(name, help=text, description=f"Run {text}, for containers.")
        one.add_argument("--config", type=Path, required=True, metavar="FILE")
        _add_log_options(one)
        one.set_defaults(command=runs.process)
    _add_operator_commands(commands)
    return parser


def _add_serve(commands: "Commands") -> None:
    serve = commands.add_parser(
        "serve",
        help="the same, with the command line of vllm serve",
        description="Serve a model on this machine until Ctrl-C, with the options of `vllm serve`: "
        "--tensor-parallel-size and --data-parallel-size become ranks and layout, and "
        "--served-model-name, --api-key and VLLM_API_KEY mean what they mean there. Without "
        "--host, only this machine reaches the server.",
        usage="aileron serve MODEL [options of vLLM and those below]",
        epilog="For example: aileron serve Qwen/Qwen3-8B -tp 2 --max-model-len 32768",
        allow_abbrev=False,
    )
    serve.set_defaults(command=runs.up)
    _add_cell_options(serve)


def _add_up(commands: "Commands") -> None:
    up = commands.add_parser(
        "up",
        help="serve a model on this machine",
        description="Serve a model on this machine until Ctrl-C.",
        epilog="Everything after -- is passed to vLLM as engine options, for example: "
        "aileron up --ranks 4 -- --max-model-len 32768",
    )
    up.set_defaults(command=runs.up)
    up.add_argument("--model", metavar="PATH_OR_HF_ID", help="default: the bundled demo model")
    up.add_argument(
        "--config", type=Path, metavar="FILE", help="start from this file; options override it"
    )
    _add_cell_options(up)


def _add_cell_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(config=None, served_names=(), api_keys=(), notes=())
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="devices to use; default: every GPU, or 2 on CPU")
    add("--device", choices=("auto", "cpu", "cuda"), help="default: auto")
    add(
        "--ranks-per-device",
        type=int,
        metavar="N",
        help="ranks that share a GPU, to try out wide groups; slow; default: 1",
    )
    add("--widths", metavar="1,2,4", help="group widths; default: powers of two up to --ranks")
    add("--layout", metavar="dp4", help="layout to start in; default: every rank alone")
    prepared = "groups to prepare, separated by commas; default: those of --layout"
    add("--mixed", metavar="sp2tp2", help=f"mixed {prepared}")
    add("--pipelines", metavar="pp2", help=f"pipeline {prepared}")
    _add_memory_options(parser)
    add("--policy", choices=("adaptive", "fixed"), help="who chooses the layout; default: fixed")
    add("--precopy", choices=("on", "off"), help="copy KV before a switch stops; default: off")
    add(
        "--step-times",
        type=Path,
        metavar="FILE",
        help="step times for the adaptive policy, instead of those that ranks measure",
    )
    add(
        "--observation-log",
        type=Path,
        metavar="FILE",
        help="log the adaptive policy's observations, for aileron replay",
    )
    add("--host", help="address of the serving port; default: 127.0.0.1")
    add("--port", type=int, help="serving port, 0 for any free one; default: 8000")
    add("--admin-port", type=int, help="admin port, 0 for any free one; default: 8001")
    add(
        "--gateways",
        type=int,
        metavar="N",
        help="gateway processes on that port; default: 2 for each GPU as far as a quarter of the "
        "cores suffices, and 1 on CPU or with keys that no Redis counts",
    )
    add("--keys", type=Path, metavar="FILE", help="require the API keys of this file (aileron key)")
    add(
        "--insecure-no-auth",
        action="store_true",
        help="serve without API keys on an address that other machines reach",
    )
    add("--verbose", action="store_true", help="show the processes' logs, without requests")
    add(
        "--log-requests",
        action="store_true",
        help="show one line for each request; without it they are only in gateway.log",
    )
    _add_log_options(parser)


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--weight-parts",
        type=int,
        metavar="N",
        help="parts of the weights, of which each rank holds one; default: 1",
    )
    add(
        "--borrow",
        choices=("none", "ffn", "all"),
        help="layers that are in parts, which ranks read from each other; with none only the "
        "widest groups serve; default: ffn",
    )
    add(
        "--whole-layers",
        type=whole_layers,
        metavar="N|auto|N,N,…",
        help="layers that every rank holds whole, for faster small steps; or one number for each "
        "rank; default: 0",
    )
    add(
        "--host-kv",
        type=host_kv,
        metavar="GIB|auto",
        help="host memory for KV pages of all ranks; default: auto, a tenth of it on CUDA",
    )


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    words = "default: as in the --config file, else"
    parser.add_argument("--log-level", choices=LOG_LEVELS, help=f"least level; {words} info")
    parser.add_argument("--log-format", choices=LOG_FORMATS, help=f"form of lines; {words} json")


def _add_operator_commands(commands: "Commands") -> None:
    status = commands.add_parser("status", help="ranks, layout, epoch, queues, free pages")
    status.add_argument("--once", action="store_true", help="print once; the default in a pipe")
    status.set_defaults(command=runs.status)
    switch = commands.add_parser("switch", help="change the layout and wait until it serves")
    switch.add_argument("layout", metavar="LAYOUT", help="such as dp4, tp2+dp2 or tp4")
    switch.add_argument("--carry", choices=CARRIES, help="what happens to running tasks")
    switch.set_defaults(command=runs.switch)
    put_back = commands.add_parser("put-back", help="return a mode to service after drift")
    put_back.add_argument("mode", metavar="MODE", help="such as tp2; see aileron status")
    put_back.set_defaults(command=runs.put_back)
    renew = commands.add_parser("renew", help="restart all ranks, so that all groups can form")
    renew.add_argument(
        "ranks", nargs="*", type=int, metavar="RANK", help="only the ranks of one group"
    )
    renew.set_defaults(command=runs.renew)
    explain = commands.add_parser("explain", help="why the cell has its layout")
    explain.add_argument("--last", type=int, default=5, metavar="N", help="default: 5")
    explain.set_defaults(command=runs.explain)
    reload = commands.add_parser(
        "reload",
        help="read the configuration file again",
        description="Let the coordinator read its configuration file again: slo, policy, bounds of "
        "tiers and log.level apply at once. Gateways follow their file by themselves.",
    )
    reload.set_defaults(command=runs.reload)
    usage = commands.add_parser("usage", help="requests and tokens per tenant and tier")
    usage.add_argument("--by", choices=("hour", "day"), default="day", help="default: day")
    usage.add_argument("--last", type=int, metavar="N", help="only the newest N hours or days")
    usage.add_argument("--tenant", metavar="NAME", help="only this tenant")
    usage.set_defaults(command=runs.usage)
    for each in (status, switch, put_back, renew, explain, reload, usage):
        each.add_argument("--json", action="store_true", help="print JSON")
        each.add_argument("--admin-url", metavar="URL", help=ADMIN_URL_HELP)
        each.add_argument("--admin-ca", metavar="FILE", help=ADMIN_CA_HELP)
    _add_replay(commands)
    _add_key(commands)
    _add_config(commands)
    _add_doctor(commands)
    _add_plan(commands)


def _add_doctor(commands: "Commands") -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what this machine can run, and what is missing",
        description="Check this machine and start the demo model's ranks; with --model, only "
        "whether that model can be served, from its files and within seconds.",
        epilog="As in aileron up, options of vLLM may follow after --.",
    )
    doctor.set_defaults(command=_doctor)
    add = doctor.add_argument
    add("model_word", nargs="?", metavar="MODEL", help="the same as --model")
    add("--model", metavar="PATH_OR_HF_ID", help="check whether it can be served")
    add("--ranks", "--gpus", type=int, metavar="N", help="as in aileron up")
    add("--widths", metavar="1,2,4", help="as in aileron up")
    add("--device", choices=("auto", "cpu", "cuda"), help="as in aileron up")


def _add_plan(commands: "Commands") -> None:
    plan = commands.add_parser(
        "plan",
        help="what a model needs on some GPUs, and what fits",
        description="Say from a model's config.json alone what each layout holds: weights and KV "
        "tokens, the longest request, whether it fits, and what to change if not.",
        epilog="As in aileron up, options of vLLM may follow after --.",
    )
    plan.set_defaults(command=runs.plan)
    add = plan.add_argument
    add("model_word", nargs="?", metavar="MODEL", help="folder or Hugging Face id")
    add("--model", metavar="PATH_OR_HF_ID", help="the same as MODEL")
    add("--gpus", type=int, metavar="N", help="default: every GPU of this machine, or 1")
    add("--ranks", type=int, metavar="N", help="the same, or ranks on the CPU of this machine")
    add(
        "--memory",
        type=float,
        metavar="GIB",
        help="memory of each GPU as nvidia-smi lists it, in GiB; default: that of this machine's",
    )
    add("--device", choices=("auto", "cpu", "cuda"), help="default: auto")
    add("--weight-parts", type=int, metavar="N", help="only this number; default: all that fit")
    add("--borrow", choices=("none", "ffn", "all"), help="only this; default: each")
    add("--whole-layers", type=int, metavar="N", help="as in aileron up; default: 0")
    add(
        "--host-kv", type=float, metavar="GIB", help="host memory for KV pages; shows what it holds"
    )
    add("--mixed", metavar="sp2tp2", help="as in aileron up")
    add("--revision", metavar="NAME", help="revision on Hugging Face; default: main")
    for name, kind, metavar in (
        ("max-model-len", str, "TOKENS"),
        ("gpu-memory-utilization", float, "SHARE"),
        ("dtype", str, "TYPE"),
        ("quantization", str, "NAME"),
        ("kv-cache-dtype", str, "TYPE"),
        ("max-num-seqs", int, "N"),
        ("max-num-batched-tokens", str, "N"),
        ("kv-cache-memory-bytes", str, "BYTES"),
        ("block-size", int, "TOKENS"),
    ):
        add(f"--{name}", type=kind, metavar=metavar, help="as in vLLM")
    add("--json", action="store_true", help="print JSON")


def _add_replay(commands: "Commands") -> None:
    replay = commands.add_parser(
        "replay",
        help="replay an observation log, with other settings",
        description="Replay the log of `aileron up --observation-log FILE` offline: the layouts "
        "that the policy would choose, and the results that the log's cost model predicts.",
    )
    replay.set_defaults(command=runs.replay)
    add = replay.add_argument
    add("log", type=Path, metavar="LOG")
    add("--policy", choices=("adaptive", "fixed"), default="adaptive", help="default: adaptive")
    add("--layout", metavar="dp4", help="layout to begin with; default: that of the log")
    for name, text in (
        ("stay-ms", "shortest time in a layout"),
        ("settle-ms", "how long another layout must look a little better"),
        ("caution-ms", "how long to avoid a wide layout that the policy had to leave soon"),
        ("horizon-ms", "how far ahead the policy predicts"),
        ("switches-per-minute-max", "most switches per minute"),
    ):
        add(f"--{name}", type=int, metavar="N", help=f"{text}; default: as logged")
    add("--json", action="store_true", help="print JSON")


def _add_key(commands: "Commands") -> None:
    key = commands.add_parser(
        "key",
        help="make, list and revoke API keys",
        description="Make, list and revoke API keys. A file of keys holds only their hashes, and "
        "gateways read it again when it changes.",
    )
    actions = key.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_key_new(actions)
    for action, text, command in (
        ("list", "the keys of a file, without the keys themselves", runs.key_list),
        ("revoke", "refuse a key from now on", runs.key_revoke),
    ):
        one = actions.add_parser(action, help=text)
        one.set_defaults(command=command)
        if action == "revoke":
            one.add_argument("key", metavar="NAME", help="the key's name, or a part of its prefix")
        else:
            one.add_argument("--json", action="store_true", help="print JSON")
        one.add_argument("--file", type=Path, required=True, metavar="FILE", help="file of keys")


def _add_key_new(actions: "Commands") -> None:
    new = actions.add_parser(
        "new",
        help="make a key",
        description="Make an API key. It is printed once; files hold only its hash.",
    )
    new.set_defaults(command=runs.key_new)
    add = new.add_argument
    add(
        "--tenant",
        required=True,
        metavar="NAME",
        help="the tenant that its requests are charged to",
    )
    add("--name", dest="key_name", metavar="NAME", help="the key's name; default: the tenant's")
    add("--file", type=Path, metavar="FILE", help="add it to this file; default: print the entry")
    add(
        "--expires",
        metavar="90d|DATE",
        help="refuse it after this span, or from this date or time on (UTC); default: never",
    )
    add("--max-tier", choices=TIERS, default="interactive", help="default: interactive")
    add("--default-tier", choices=TIERS, help="default: standard, or batch if --max-tier is batch")
    for name, text in (
        ("requests-per-minute", "requests"),
        ("tokens-per-minute", "prompt and generated tokens"),
        ("tokens-per-day", "prompt and generated tokens from 00:00 UTC"),
        ("max-parallel", "requests at once, for each gateway process"),
    ):
        add(f"--{name}", type=int, metavar="N", help=f"most {text}; default: no limit")


def _add_config(commands: "Commands") -> None:
    config = commands.add_parser(
        "config",
        help="check a configuration file, or show what it means",
        description="Check a configuration file, show it with every default, or print its schema. "
        "Nothing is started.",
    )
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text, command in (
        ("check", "every fault of a file, each with its line", runs.config_check),
        ("show", "the whole configuration with defaults, without secrets", runs.config_show),
        ("schema", "the JSON schema of the file, for editors", runs.config_schema),
    ):
        one = actions.add_parser(action, help=text, description=f"Print {text}.")
        one.set_defaults(command=command)
        is_schema = action == "schema"
        file_help = "is not read" if is_schema else "the configuration of a cell"
        one.add_argument(
            "file", type=Path, metavar="FILE", nargs="?" if is_schema else None, help=file_help
        )
        if not is_schema:
            one.add_argument("--json", action="store_true", help="print JSON")


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from coordinator.protocol.version import NOT_INSTALLED, own_version

        installed = own_version()
        if installed == NOT_INSTALLED:
            print("aileron, not installed: run `make setup`")
        else:
            print(f"aileron {installed}")
        parser.exit()


def _doctor(options: argparse.Namespace) -> int:
    from coordinator.cli.doctor import check_one_model, run_doctor

    own = [
        word
        for name in ("model", "ranks", "widths", "device")
        if (value := getattr(options, name)) is not None
        for word in (f"--{name}", str(value))
    ]
    if options.model is None:
        return run_doctor(parse_arguments(["up", *own, "--port", "0", "--admin-port", "0"]))
    return check_one_model(parse_arguments(["up", *own, "--", *options.engine_args]))
