"""`aileron config`: checks a configuration, shows it with every default, or prints its schema."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.protocol.config import ENTANGLED, Config
from coordinator.protocol.config_schema import config_schema
from coordinator.protocol.model_check import checked_options
from coordinator.protocol.secret_text import without_secrets
from coordinator.protocol.settings_file import Fault, Reading, read_settings


def run_config_check(options: argparse.Namespace) -> int:
    """Print every fault of a file with its line; the status is 2 if there is one."""
    reading = _read(options.file, checked_options)
    if options.json:
        faults = [{"line": each.line, "message": each.sentence} for each in reading.faults]
        print(json.dumps({"file": str(options.file), "faults": faults}, indent=2))
    elif reading.faults:
        _print_faults(options.file, reading.faults)
    else:
        print(f"{options.file}: no faults.")
    return USAGE_STATUS if reading.faults else 0


def run_config_show(options: argparse.Namespace) -> int:
    """Print the whole configuration that processes use, without secrets."""
    reading = _read(options.file)
    if reading.value is None:
        _print_faults(options.file, reading.faults)
        return USAGE_STATUS
    visible = without_secrets(reading.value.model_dump(mode="json"))
    if options.json:
        print(json.dumps(visible, indent=2))
    else:
        print(yaml.safe_dump(visible, sort_keys=False, allow_unicode=True), end="")
    return 0


def run_config_schema(_: argparse.Namespace) -> int:
    """Print the JSON schema of the file."""
    print(json.dumps(config_schema(), indent=2))
    return 0


def _read(file: Path, last: Callable[[Config], object] | None = None) -> Reading[Config]:
    try:
        return read_settings(file, Config, ENTANGLED, last)
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}.", USAGE_STATUS) from error


def _print_faults(file: Path, faults: tuple[Fault, ...]) -> None:
    for fault in faults:
        place = f"{file}:{fault.line}" if fault.line else f"{file}"
        print(f"{place}: {fault.sentence}", file=sys.stderr)
