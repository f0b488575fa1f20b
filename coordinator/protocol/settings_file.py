"""Reads a YAML file of settings and finds every fault in it, with its line. Pure, but for reading.

A check of a model ends at its first layer of faults: relations between settings are checked only
where all of them are valid. So what is faulty is left out and the rest is checked again.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from coordinator.protocol.mistakes import Mistake, Place, mistakes_of

ROUNDS_MAX = 4
"""Most checks of one file; each leaves out what the one before it found."""

PLACEHOLDER = "x"
"""Stands for a setting that is missing, while the rest is checked."""

Model = TypeVar("Model", bound=BaseModel)

NO_SETTINGS = "it has no settings: write `name: value` lines."
"""The fault of an empty file."""
_NAMES = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to change in a file."""

    line: int
    """From 1; 0 where the file has no line for it."""
    sentence: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.sentence}" if self.line else self.sentence


@dataclass(frozen=True, slots=True)
class Reading(Generic[Model]):
    """The content of a file; without a value there is at least one fault."""

    value: Model | None
    faults: tuple[Fault, ...]
    is_empty: bool = False
    """Whether the file has no content, which some kinds of files allow."""


def read_settings(
    path: Path,
    model: type[Model],
    entangled: frozenset[str] = frozenset(),
    last: Callable[[Model], object] | None = None,
) -> Reading[Model]:
    """Read and check a file; raises OSError. See `check_text`."""
    return check_text(path.read_bytes(), model, entangled, last)


def check_text(
    text: bytes | str,
    model: type[Model],
    entangled: frozenset[str] = frozenset(),
    last: Callable[[Model], object] | None = None,
) -> Reading[Model]:
    """Check the text of a file; the faults of the model's own checks quote no value of it.

    Settings of an `entangled` section depend on each other beyond what sentences name, so after a
    fault in it, no contradiction within it is reported. Where all is valid, `last` may raise a
    ValueError about more than the model knows.
    """
    loader = yaml.SafeLoader("")
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        data = None if root is None else loader.construct_document(root)
    except (yaml.YAMLError, ValueError) as error:
        return Reading(None, (_syntax_fault(error),))
    if root is None or not isinstance(data, dict) or not data:
        return Reading(None, (Fault(0, NO_SETTINGS),), is_empty=data is None or data == {})
    lines = _Lines(root)
    value, mistakes = _check(data, model, entangled)
    if value is not None and last is not None:
        try:
            last(value)
        except ValueError as error:
            mistakes = [Mistake((), str(error))]
    faults = [*_twice(root), *(Fault(lines.of(each), each.sentence) for each in mistakes)]
    faults.sort(key=lambda fault: fault.line)
    return Reading(None if faults else value, tuple(faults))


def _syntax_fault(error: Exception) -> Fault:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    if mark is not None and problem:
        if isinstance(error, (yaml.composer.ComposerError, yaml.constructor.ConstructorError)):
            problem = problem.partition(" '")[0]  # The rest quotes the file.
        return Fault(mark.line + 1, f"this is not valid YAML: {problem}.")
    return Fault(0, "it is not valid YAML.")


def _check(
    data: dict[Any, Any], model: type[Model], entangled: frozenset[str]
) -> tuple[Model | None, list[Mistake]]:
    """Return the value, or every mistake."""
    rest = data
    found: dict[str, Mistake] = {}
    changed: set[str] = set()
    for _ in range(ROUNDS_MAX):
        try:
            value = model.model_validate(rest)
        except ValidationError as error:
            new = [
                mistake
                for mistake in mistakes_of(error, model)
                if mistake.sentence not in found and not _may_follow(mistake, changed)
            ]
        else:
            return (None if found else value), list(found.values())
        found.update((mistake.sentence, mistake) for mistake in new)
        places = [mistake.place for mistake in new if mistake.place]
        if not places:
            break
        rest = deepcopy(data) if rest is data else rest
        for place in places:
            section, path = str(place[0]), ".".join(map(str, place))
            changed.add(section if section in entangled else path)
            _leave_out(rest, place)
    return None, list(found.values())


def _may_follow(mistake: Mistake, changed: set[str]) -> bool:
    """Return whether a contradiction may only follow from a fault that was left out."""
    names = {*_NAMES.findall(mistake.sentence), ".".join(map(str, mistake.place))}
    return any(f"{name}.".startswith(f"{path}.") for name in names for path in changed)


def _leave_out(data: Any, place: Place) -> None:
    """Remove a setting; one that is missing gets a value instead, and of a list all goes."""
    inner, parent = data, None
    for number, name in enumerate(place):
        if isinstance(inner, list) or not isinstance(inner, dict):
            if parent is not None:
                parent.pop(place[number - 1], None)
            return
        if number == len(place) - 1:
            if name in inner:
                del inner[name]
            else:
                inner[name] = PLACEHOLDER
            return
        parent, inner = inner, inner.get(name)


class _Lines:
    """Finds the lines of settings in a file."""

    def __init__(self, root: yaml.Node) -> None:
        self._root = root

    def of(self, mistake: Mistake) -> int:
        """Return the line of a mistake, else of the first setting that its sentence names."""
        place, names = mistake.place, _NAMES.findall(mistake.sentence)
        path = "".join(f"{name}." for name in place)
        # A section is at fault for settings in it; without a place, the named ones contradict.
        inner = [name for name in names if "." in name and name.startswith(path)]
        for name in inner:
            if (line := self._line(tuple(name.split(".")))) is not None:
                return line
        if place and (line := self._line(place)) is not None:
            return line
        for number in range(len(place) - 1, 0, -1):
            if (line := self._line(place[:number])) is not None:
                return line
        return 0

    def _line(self, place: Place) -> int | None:
        """Return the line of a setting's name; None if the file has none."""
        node: yaml.Node | None = self._root
        line = 0
        for name in place:
            if isinstance(node, yaml.MappingNode):
                pairs = [pair for pair in node.value if pair[0].value == str(name)]
                if not pairs:
                    return None
                line, node = pairs[-1][0].start_mark.line, pairs[-1][1]
            elif isinstance(node, yaml.SequenceNode) and str(name).isdigit():
                if int(name) >= len(node.value):
                    return None
                node = node.value[int(name)]
                line = node.start_mark.line
            else:
                return None
        return line + 1


def _twice(node: yaml.Node, path: str = "") -> Iterator[Fault]:
    """Yield a fault for each setting that stands twice: YAML would use the last one silently."""
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _twice(each, path)
    if not isinstance(node, yaml.MappingNode):
        return
    first: Mapping[str, int] = {}
    for name, value in node.value:
        if isinstance(name.value, str) and name.value != "<<":
            line, full = name.start_mark.line + 1, f"{path}{name.value}"
            if name.value in first:
                text = f"{full} stands here again after line {first[name.value]}: keep one of them."
                yield Fault(line, text)
            first = {**first, name.value: line}
            yield from _twice(value, f"{full}.")
