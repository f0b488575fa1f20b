"""docs/cli.md, from the parsers of the `aileron` command."""

import argparse
from collections.abc import Iterator

from coordinator.cli.arguments import _parser
from tests.harness.docs.tables import sentence, table

HEAD = """# Command line

`aileron COMMAND --help` prints what this page says. A command that cannot do what it is asked ends with one sentence on
stderr and exit status 1, or 2 where the command line or a file must change first. `python -m tests.harness.docs` writes
this page from the parsers.
"""

Commands = argparse._SubParsersAction


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_commands(_parser(), "aileron", 2))


def _commands(parser: argparse.ArgumentParser, name: str, level: int) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, Commands):
            continue
        helps = {each.dest: each.help or "" for each in action._choices_actions}
        for word, command in action.choices.items():
            yield from _command(command, f"{name} {word}", helps.get(word, ""), level)
            yield from _commands(command, f"{name} {word}", level + 1)


def _command(parser: argparse.ArgumentParser, name: str, short: str, level: int) -> Iterator[str]:
    own = [each for each in parser._actions if not isinstance(each, argparse._HelpAction)]
    options = [each for each in own if each.option_strings]
    words = [each for each in own if not each.option_strings and not isinstance(each, Commands)]
    usage = parser.usage or " ".join(
        [name, *(_value_of(each) for each in words), *(["[options]"] if options else [])]
    )
    yield f"\n{'#' * level} `{name}`\n\n{sentence(parser.description or short)}\n"
    yield f"\n```text\n{usage}\n```\n"
    rows = [(f"`{_form_of(each)}`", _text_of(parser, each)) for each in [*words, *options]]
    if rows:
        yield "\n" + table(("argument", "meaning"), rows)
    if parser.epilog:
        yield f"\n{sentence(parser.epilog)}\n"


def _form_of(action: argparse.Action) -> str:
    value = _value_of(action)
    return ", ".join(f"{each} {value}".strip() for each in action.option_strings) or value


def _value_of(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    value = str(action.metavar or (action.dest.upper() if action.option_strings else action.dest))
    return f"[{value} …]" if action.nargs == "*" else value


def _text_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"{text}; needed" if action.required and action.option_strings else text
