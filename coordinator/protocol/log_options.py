"""The options of every process's command line that override the configuration of its log."""

import argparse
from typing import get_args

from coordinator.protocol.config import Config
from coordinator.protocol.log_config import LEVELS, LogFormat

FORMATS = get_args(LogFormat)


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Add `--log-level` and `--log-format`."""
    parser.add_argument(
        "--log-level", choices=LEVELS, help="least level of log lines; default: that of the config"
    )
    parser.add_argument(
        "--log-format", choices=FORMATS, help="form of log lines; default: that of the config"
    )


def with_log_options(config: Config, options: argparse.Namespace) -> Config:
    """Return the configuration with what the options override."""
    given = {"level": options.log_level, "format": options.log_format}
    changed = {name: value for name, value in given.items() if value is not None}
    return config.model_copy(update={"log": config.log.model_copy(update=changed)})
