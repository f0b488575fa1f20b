"""The options of vLLM's server as `coordinator/protocol/vllm_options.json` has them.

`python -m tests.harness.vllm.option_table` prints the file.
"""

import argparse
import json
from typing import Any

NUMBERS = {"int": ("7", 7), "float": ("0.5", 0.5)}


def kind_of(action: argparse.Action) -> str:
    """What an option takes: nothing, numbers, or text that vLLM checks itself."""
    if action.nargs == 0:
        return "flag"
    if action.type is None or takes(action, "{}", {}):
        return "text"
    if takes(action, "1k", 1000):
        return "size"
    for kind, (text, value) in NUMBERS.items():
        if takes(action, text, value) and not takes(action, "x", "x"):
            return kind
    return "text"


def takes(action: argparse.Action, text: str, value: Any) -> bool:
    """Whether an option reads a text as this value, of the same type."""
    read: Any = action.type
    try:
        found = read(text)
    except Exception:  # noqa: BLE001 -- readers raise what they like
        return False
    return type(found) is type(value) and found == value


def table() -> list[dict[str, Any]]:
    """Every option in order of its names."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(add_help=False))
    options = []
    for action in parser._actions:
        if not action.option_strings:
            continue
        option: dict[str, Any] = {"names": list(action.option_strings), "kind": kind_of(action)}
        if action.nargs in ("?", "+", "*"):
            option["many"] = action.nargs
        if action.choices is not None:
            option["choices"] = [str(each) for each in action.choices]
        if action.type is not None and takes(action, "None", None):
            option["none"] = True
        options.append(option)
    return sorted(options, key=lambda option: option["names"])


def text() -> str:
    """The file: one option a line."""
    lines = ",\n".join(json.dumps(option) for option in table())
    return f"[\n{lines}\n]\n"


if __name__ == "__main__":
    print(text(), end="")
