"""`aileron replay`: replays an observation log offline."""

import argparse
import codecs
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec

from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.cli.tables import format_table
from coordinator.model.observation_log import Line, decode
from coordinator.policy.replay import Replayed, ReplayError, replay, summary, without_repeats

SETTINGS = ("stay_ms", "settle_ms", "caution_ms", "horizon_ms", "switches_per_minute_max")


def run_replay(options: argparse.Namespace) -> int:
    """Print the replayed choices, and the predicted results for requests."""
    changed = {
        name: value for name in SETTINGS if (value := getattr(options, name, None)) is not None
    }
    if any(value < 0 for value in changed.values()):
        raise CliError("settings of a replay must not be negative: use 0 or more.", USAGE_STATUS)
    try:
        found = replay(
            _lines(options.log),
            is_adaptive=options.policy == "adaptive",
            layout=options.layout,
            changed=changed,
        )
    except ReplayError as error:
        raise CliError(f"{options.log}: {error}", USAGE_STATUS) from error
    steps = without_repeats(found)
    if options.json:
        json.dump(
            {**summary(found), "steps": [asdict(each) for each in steps]}, sys.stdout, indent=2
        )
        print()
        return 0
    print(_table(steps, found[0].time_ms))
    total = summary(found)
    print(
        f"\n{total['observations']} observations, {total['changes']} changes. Requests that meet "
        f"their goals, as predicted: {total['met_as_logged']:.1%} in the layouts of the log, "
        f"{total['met_replayed']:.1%} in those of the replay."
    )
    return 0


def _lines(path: Path) -> Iterator[Line]:
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                try:
                    yield decode(text.removeprefix(codecs.BOM_UTF8) if number == 1 else text)
                except msgspec.DecodeError as error:
                    raise ReplayError(f"line {number} is no line of a log: {error}.") from error
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}.", USAGE_STATUS) from error


def _table(steps: list[Replayed], start_ms: int) -> str:
    rows = [
        (
            f"{(each.time_ms - start_ms) / 1000:.2f}",
            each.was,
            f"{each.was_met:.0%}",
            each.now,
            f"{each.now_met:.0%}",
            each.reason,
        )
        for each in steps
    ]
    return format_table(("s", "in the log", "met", "replayed", "met", "because"), rows)
