"""vLLM's command line, read without importing vLLM, which takes seconds.

`vllm_options.json` lists vLLM's options; a test compares it with vLLM's own parser. vLLM reads the
options again and has the last word: this module finds the mistakes that one can see at once.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from coordinator.protocol.mistakes import proposal

TABLE = Path(__file__).with_name("vllm_options.json")
_LEVEL = re.compile(r"-O=?(\w+)")
_NEGATIVE = re.compile(r"-\.?\d")
_SIZE = re.compile(r"auto|-?\d+|\d+(\.\d+)?[kmgtKMGT]")
_NUMBERS = {
    "int": "a whole number",
    "float": "a number",
    "size": "a number such as 4096 or 4k",
}
"""Kind of an option that takes numbers -> their form in words."""
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""vLLM's suffixes of sizes."""
_NOTHING = ("", "None")
"""Values of an option that may be none, in place of one."""


_NO_CORS = "let a proxy in front answer pages of other origins"
NOT_OFFERED = {
    **dict.fromkeys(
        ("--allowed-origins", "--allow-credentials", "--allowed-methods", "--allowed-headers"),
        _NO_CORS,
    ),
    "--ssl-keyfile": "set gateway.tls_key_file",
    "--ssl-certfile": "set gateway.tls_cert_file",
    "--ssl-ca-certs": "let a proxy in front ask clients for certificates",
    "--api-key": "set gateway.keys_file",
    "--host": "set gateway.host",
    "--port": "set gateway.port",
    "--uds": "set gateway.host and gateway.port",
    "--middleware": "the gateway calls vLLM's app directly",
    "--root-path": "the gateway serves the paths of OpenAI's API",
}
"""Options of vLLM's server that would have no effect, or a wrong one -> what to do instead."""


class OptionError(ValueError):
    """An option that vLLM would refuse; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Option:
    """One of vLLM's options."""

    names: tuple[str, ...]
    kind: str
    many: str = ""
    """argparse's sign for a number of values: ? or +; empty for one."""
    choices: tuple[str, ...] = ()
    may_be_none: bool = False
    """Whether the text None is no value."""

    @property
    def name(self) -> str:
        """The long name."""
        return next(name for name in self.names if name.startswith("--"))


@dataclass(frozen=True, slots=True)
class GivenOption:
    """An option on a command line."""

    name: str
    """Its long name in vLLM."""
    values: tuple[str, ...]
    words: tuple[str, ...]
    """The words of the command line, as they were."""


@cache
def options_by_name() -> dict[str, Option]:
    """Return vLLM's options by each of their names."""
    rows = json.loads(TABLE.read_text())
    options = [
        Option(
            tuple(row["names"]),
            row["kind"],
            row.get("many", ""),
            tuple(row.get("choices", ())),
            row.get("none", False),
        )
        for row in rows
    ]
    return {name: option for option in options for name in option.names}


def is_known(name: str) -> bool:
    """Return whether vLLM has an option of this name."""
    try:
        _find(name, ())
    except OptionError:
        return False
    return True


def read_options(
    words: Sequence[str], other_names: Collection[str] = ()
) -> tuple[list[GivenOption], list[str]]:
    """Return the options and the other words; raises `OptionError` for what vLLM would refuse.

    `other_names` are proposed for an unknown one as well.
    """
    given, others = [], []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _is_option(word):
            others.append(word)
            continue
        name, equals, value = word.partition("=")
        if level := _LEVEL.fullmatch(word):
            name, equals, value = "--optimization-level", "=", level[1]
        option = _find(name, other_names)
        values = [value] if equals else []
        if not equals:
            values = list(_values_of(option, rest, is_part="." in name))
            del rest[: len(values)]
        _check(option, values, is_part="." in name)
        given.append(GivenOption(option.name, tuple(values), (word, *([] if equals else values))))
    return given, others


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE.match(word)


def _find(name: str, other_names: Collection[str]) -> Option:
    options = options_by_name()
    if name == "-O":
        return options["--optimization-level"]
    whole = name.split(".", 1)[0]
    if whole.startswith("--"):
        whole = whole.replace("_", "-")
    if whole in options:
        return options[whole]
    # argparse takes the beginning of one name for the whole.
    begun = {option.name for key, option in options.items() if key.startswith(whole)}
    if len(begun) == 1 and whole.startswith("--") and len(whole) > len("--"):
        return options[begun.pop()]
    raise OptionError(f"vLLM has no option {whole}{proposal(whole, [*options, *other_names])}")


def _values_of(option: Option, rest: Sequence[str], *, is_part: bool) -> Iterator[str]:
    if option.kind == "flag":
        return
    for word in rest:
        if _is_option(word):
            return
        yield word
        if option.many != "+" or is_part:
            return


def _check(option: Option, values: Sequence[str], *, is_part: bool) -> None:
    if option.kind == "flag":
        if values:
            raise OptionError(f"{option.name} takes no value: leave out {values[0]!r}.")
        return
    if not values and option.many != "?":
        raise OptionError(f"{option.name} needs a value.")
    if is_part and option.kind in _NUMBERS:
        raise OptionError(f"{option.name} takes {_NUMBERS[option.kind]} and has no parts.")
    for value in values if not is_part else ():
        if option.may_be_none and value in _NOTHING:
            continue
        if option.choices and value not in option.choices:
            known = ", ".join(option.choices)
            raise OptionError(f"{option.name} cannot be {value!r}: use one of {known}.")
        if option.kind in _NUMBERS and not _is_number(option.kind, value):
            raise OptionError(f"{option.name} takes {_NUMBERS[option.kind]}, not {value!r}.")


def _is_number(kind: str, value: str) -> bool:
    """Return whether Python reads the value as a finite number, as vLLM does."""
    if kind == "size":
        return _SIZE.fullmatch(value.strip()) is not None
    try:
        return math.isfinite(int(value) if kind == "int" else float(value))
    except (ValueError, OverflowError):
        return False


def last_value(given: Sequence[GivenOption], name: str) -> str | None:
    """Return the value of the last such option, "" if it has none; None if it is not given.

    It is not given either if vLLM reads the value as none.
    """
    for option in reversed(given):
        if option.name == name:
            value = option.values[0] if option.values else ""
            return None if options_by_name()[name].may_be_none and value in _NOTHING else value
    return None


def size_value(given: Sequence[GivenOption], name: str) -> int:
    """Return the value of an option that takes a size such as 4096, 4k or 4K; 0 if it is open."""
    text = (last_value(given, name) or "").strip()
    if text in ("", "auto", "-1"):
        return 0
    unit = {**_SUFFIXES, **_BINARY}.get(text[-1])
    return int(text) if unit is None else int(float(text[:-1]) * unit)


def is_on(given: Sequence[GivenOption], name: str) -> bool:
    """Return whether the last of a flag and its opposite turns it on."""
    opposite = name.replace("--", "--no-", 1)
    for option in reversed(given):
        if option.name == name:
            return not any(word.replace("_", "-") == opposite for word in option.words)
    return False
