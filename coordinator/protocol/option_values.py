"""Values of vLLM's options that vLLM would refuse, but only once a process has imported it.

vLLM has the last word: this module finds the mistakes that one can see at once.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from coordinator.protocol.engine_options import GivenOption, OptionError, last_value, size_value

COUNTS = ("--max-num-seqs", "--max-num-batched-tokens", "--block-size")
"""Options that take whole numbers of 1 or more."""
FILES = ("--chat-template", "--tool-parser-plugin", "--reasoning-parser-plugin")
"""Options of gateways that may name a file; a chat template may be text, or a name of vLLM's."""
JSON_ENDINGS = ("-config", "-overrides", "-kwargs", "-per-prompt")
"""How the names of options end whose value is a JSON object if it begins like one."""
_TEMPLATE = frozenset("{}\n")
"""Characters of a template's text; vLLM tells it from a path by them."""


def check_values(options: Sequence[GivenOption]) -> None:
    """Raise `OptionError`, one sentence, for the first value that cannot be."""
    counts = {}
    for name in COUNTS:
        value = last_value(options, name)
        if value is None:
            continue
        counts[name] = size_value(options, name)
        if counts[name] < 1:
            raise OptionError(f"{name} {value}: use 1 or more, or leave it out.")
    seqs, tokens = (counts.get(name) for name in COUNTS[:2])
    if seqs is not None and tokens is not None and tokens < seqs:
        raise OptionError(
            f"{COUNTS[1]} {tokens} is less than {COUNTS[0]} {seqs}: a step computes a token of "
            "each request at least, so raise the first or lower the second."
        )
    for option in options:
        if option.name.endswith(JSON_ENDINGS):
            _check_json(option)


def check_paths(options: Sequence[GivenOption]) -> None:
    """Raise `OptionError` for a path that names no file of this machine."""
    for name in FILES:
        path = last_value(options, name) or ""
        if "/" in path and not _TEMPLATE & set(path) and not Path(path).is_file():
            raise OptionError(f"{name} {path} is no file: check the path.")


def _check_json(option: GivenOption) -> None:
    for value in option.values:
        if not value.lstrip().startswith("{"):
            continue
        try:
            json.loads(value)
        except ValueError as error:
            # The value may hold a secret; the place of the fault does not.
            place = getattr(error, "colno", 1)
            raise OptionError(
                f"{option.name} takes JSON, and this is none from character {place} on: put it "
                "in single quotes and its names in double quotes."
            ) from error
