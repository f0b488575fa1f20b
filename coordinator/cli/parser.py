"""argparse's parser and readers of values, whose errors are sentences that say what to do."""

import argparse
import re
from collections.abc import Iterator
from typing import NoReturn

from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.protocol.mistakes import proposal

_KINDS = {"int": "a whole number", "float": "a number"}
_CHOICE = re.compile(r"argument (.+?): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
_TYPE = re.compile(r"argument (.+?): invalid (int|float) value: '(.*)'", re.DOTALL)
_NO_VALUE = re.compile(r"argument (.+?): expected (?:one argument|at least one argument)")
_FLAG = re.compile(r"argument (.+?): ignored explicit argument '(.*)'", re.DOTALL)
_MISSING = re.compile(r"the following arguments are required: (.+)")
_AMBIGUOUS = re.compile(r"ambiguous option: (\S+) could match (.+)")
_OTHER = re.compile(r"argument (.+?): (.+)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Raises one sentence instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise the error as a `CliError`."""
        sentence = sentence_of(message, self.prog)
        raise CliError(f"{sentence} See `{self.prog} --help`.", USAGE_STATUS)


def sentence_of(message: str, program: str) -> str:
    """Return what argparse says of the command line of `program`, as a sentence."""
    return next(_sentences(message, program), f"{message}.")


def _sentences(message: str, program: str) -> Iterator[str]:
    if (found := _CHOICE.fullmatch(message)) is not None:
        names = [each.strip().strip("'") for each in found[3].split(",")]
        end = proposal(found[2], names)
        if found[1] in ("COMMAND", "ACTION"):
            yield f"`{program}` has no command {found[2]!r}{end}"
        if end == ".":
            end = f": use one of {', '.join(names)}."
        yield f"{_name(found[1])} cannot be {found[2]!r}{end}"
    if (found := _TYPE.fullmatch(message)) is not None:
        yield f"{_name(found[1])} takes {_KINDS[found[2]]}, not {found[3]!r}."
    if (found := _NO_VALUE.fullmatch(message)) is not None:
        yield f"{_name(found[1])} needs a value."
    if (found := _FLAG.fullmatch(message)) is not None:
        yield f"{_name(found[1])} takes no value: leave out {found[2]!r}."
    if (found := _MISSING.fullmatch(message)) is not None:
        yield f"{found[1]} {'are' if ',' in found[1] else 'is'} missing."
    if (found := _AMBIGUOUS.fullmatch(message)) is not None:
        yield f"{found[1]} may mean {found[2].replace(', ', ' or ')}: write it whole."
    if (found := _OTHER.fullmatch(message)) is not None:
        yield f"{_name(found[1])}: {found[2]}."


def _name(argument: str) -> str:
    """Return the first of an option's names."""
    return argument.split("/", 1)[0]


def host_kv(text: str) -> float | str:
    """Read `auto` or a number; raises `ArgumentTypeError`."""
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number nor auto") from None


def whole_layers(text: str) -> int | str | tuple[int, ...]:
    """Read `auto`, a number, or one for each rank; raises `ArgumentTypeError`."""
    if text == "auto":
        return text
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither numbers nor auto") from None
    return numbers[0] if len(numbers) == 1 else numbers
