"""`aileron serve MODEL`: reads the command line of `vllm serve` as one of `aileron up`.

vLLM's options come bare. Those that aileron decides itself become its own options: tensor and data
parallel sizes become ranks and layout. Reads a file of options; decides otherwise.
"""

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from comm_pool.mixed import Staged
from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.protocol.engine_options import (
    GivenOption,
    OptionError,
    is_known,
    last_value,
    read_options,
)

API_KEY_ENV = "VLLM_API_KEY"
"""The variable in which users of vLLM keep their key."""
TENANT = "default"
"""The tenant of keys that come from the command line."""

TENSOR, DATA, PIPELINE = (
    "--tensor-parallel-size",
    "--data-parallel-size",
    "--pipeline-parallel-size",
)
KEY, NAMES, SERVERS, CONFIG, MODEL = (
    "--api-key",
    "--served-model-name",
    "--api-server-count",
    "--config",
    "--model",
)
_READ_HERE = (TENSOR, DATA, PIPELINE, KEY, NAMES, SERVERS, CONFIG, MODEL)
_DECIDED = {
    "--enable-expert-parallel": "aileron places experts by mode",
    "--distributed-executor-backend": "aileron runs one process for each rank",
    "--data-parallel-backend": "aileron runs one process for each rank",
    "--data-parallel-size-local": "all ranks are on this host",
}
"""Options of vLLM that are left out, because aileron decides what they set."""


def parse_serve(
    parser: argparse.ArgumentParser, words: Sequence[str], environment: Mapping[str, str]
) -> argparse.Namespace:
    """Return the options as `aileron up` has them; `parser` reads aileron's own.

    Raises `CliError` with one sentence.
    """
    own, theirs = _split(parser, [word for word in words if word != "--"])
    try:
        given, others = _read(theirs, parser._option_string_actions)  # noqa: SLF001
    except OptionError as error:
        raise CliError(f"{error} (see `aileron serve --help`).", USAGE_STATUS) from error
    options = parser.parse_args(own)
    if len(others) > 1:
        raise CliError(f"{others[1]!r} is no option: name one model.", USAGE_STATUS)
    options.model = others[0] if others else last_value(given, MODEL)
    if not options.model:
        raise CliError("name the model: aileron serve MODEL.", USAGE_STATUS)
    _set_ranks(options, given)
    if (servers := _size(given, SERVERS)) is not None and options.gateways is None:
        options.gateways = servers
    names = next((option.values for option in reversed(given) if option.name == NAMES), ())
    options.served_names = tuple(names) or (options.model,)
    options.api_keys = _keys(given, "" if options.keys else environment.get(API_KEY_ENV, ""))
    if options.api_keys and options.keys:
        raise CliError(f"{KEY} and --keys exclude each other: use --keys.", USAGE_STATUS)
    options.engine_args = tuple(
        word
        for option in given
        if option.name not in _READ_HERE and option.name not in _DECIDED
        for word in option.words
    )
    options.notes = tuple(
        f"{option.name} has no effect: {_DECIDED[option.name]}"
        for option in given
        if option.name in _DECIDED
    )
    return options


def _split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the words into aileron's own options with their values, and all others."""
    takes_value = {
        name: action.nargs != 0
        for action in parser._actions  # noqa: SLF001 -- argparse has no public way to ask
        for name in action.option_strings
    }
    own: list[str] = []
    theirs: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            name = name.replace("_", "-")
        if name not in takes_value:
            theirs.append(word)
            continue
        own.append(f"{name}{equals}{value}")
        if takes_value[name] and not equals and rest:
            own.append(rest.pop(0))
    return own, theirs


def _read(words: Sequence[str], own_names: Collection[str]) -> tuple[list[GivenOption], list[str]]:
    """Read vLLM's options; those of a file of vLLM's come first, so that others override them."""
    given, others = read_options(words, own_names)
    file = last_value(given, CONFIG)
    if not file:
        return given, others
    from_file, models = read_options(list(_words_of(Path(file))))
    return [*from_file, *given], others or models


def _words_of(path: Path) -> Iterator[str]:
    """Yield the words of a file of options, as `vllm serve --config` reads it."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}.", USAGE_STATUS) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CliError(f"{path} is not valid YAML.", USAGE_STATUS) from error
    if not isinstance(data, dict):
        raise CliError(f"{path} has no options: write `name: value` lines.", USAGE_STATUS)
    for name, value in data.items():
        if name in ("model", "model_tag"):
            yield str(value)
        else:
            yield from _words_for(str(name), value)


def _words_for(name: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    if value is False:
        negative = f"--no-{name.replace('_', '-')}"
        if is_known(negative):
            yield negative
        return
    yield f"--{name}"
    if isinstance(value, dict):
        value = json.dumps(value)
    if value is not True:
        yield from (str(each) for each in (value if isinstance(value, list) else [value]))


def _set_ranks(options: argparse.Namespace, given: Sequence[GivenOption]) -> None:
    """Set ranks and layout by vLLM's parallel sizes, as far as they are given."""
    tensor, data, pipeline = (_size(given, name) for name in (TENSOR, DATA, PIPELINE))
    stages = pipeline or 1
    if tensor is None and data is None and stages == 1:
        return
    width = (tensor or 1) * stages
    for name, size in ((TENSOR, tensor), (PIPELINE, pipeline)):
        if size is not None and size & (size - 1):
            raise CliError(
                f"{name} {size}: groups are as wide as a power of two, such as 2, 4 or 8.",
                USAGE_STATUS,
            )
    if options.ranks is None:
        options.ranks = width * (data or 1)
    groups, rest = divmod(options.ranks, width)
    if rest or (data is not None and groups != data):
        raise CliError(
            f"--ranks {options.ranks} are not {data or 'some'} groups of {width}: leave out "
            f"--ranks, or {TENSOR}, {PIPELINE} and {DATA}.",
            USAGE_STATUS,
        )
    if options.layout is None:
        name = f"tp{width}" if stages == 1 else str(Staged(stages, tensor or 1))
        options.layout = f"dp{groups}" if width == 1 else "+".join([name] * groups)


def _size(given: Sequence[GivenOption], name: str) -> int | None:
    value = last_value(given, name)
    if value is None:
        return None
    if int(value) < 1:
        raise CliError(f"{name} {value}: use 1 or more.", USAGE_STATUS)
    return int(value)


def _keys(given: Sequence[GivenOption], in_environment: str) -> tuple[str, ...]:
    keys = next((option.values for option in reversed(given) if option.name == KEY), None)
    if keys is not None and not all(key.strip() for key in keys):
        raise CliError(f"{KEY} is empty: leave it out to serve without keys.", USAGE_STATUS)
    return keys or ((in_environment,) if in_environment else ())
