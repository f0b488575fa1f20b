"""Turns what a check of settings found into sentences for those who wrote them. Pure."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

SIMILAR_MIN, SIMILAR_SHORT_MIN = 0.6, 0.7
"""How similar two names must be for one to be proposed for the other, from 0 to 1."""
SHORT_CHARS_MAX = 4
"""Of names this short, the second bound holds: gpu is not cpu."""

Place = tuple[int | str, ...]
"""The names and numbers that lead to a setting."""

_INSTEAD = {
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must have settings below it",
    "model_type": "must have settings below it",
    "string_type": "must be text",
    "unquoted": "must be text: put it in quotes",
    "missing": "is missing",
}
"""pydantic's type of an error -> words that need no knowledge of Python."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing to change."""

    place: Place
    """Of the setting; empty if several settings contradict each other."""
    sentence: str


class MistakesError(ValueError):
    """Several things to change that one check found."""

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__(" ".join(sentences))
        self.sentences = tuple(sentences)


def run_checks(*checks: Callable[[], object]) -> None:
    """Run checks that raise ValueError; raises `MistakesError` with the sentences of all."""
    sentences = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            sentences.append(str(error))
    if sentences:
        raise MistakesError(list(dict.fromkeys(sentences)))


def proposal(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return the end of a sentence about an unknown name, with the most similar known one."""
    # Dashes make any two options alike.
    plain, word = {each.strip("-").lower(): each for each in names}, name.strip("-").lower()
    cutoff = SIMILAR_SHORT_MIN if len(word) <= SHORT_CHARS_MAX else SIMILAR_MIN
    found = difflib.get_close_matches(word, plain, n=1, cutoff=cutoff)
    return f"; did you mean {prefix}{plain[found[0]]}?" if found else "."


def sentences_of(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return one sentence per mistake, without the values, which may be secrets.

    With the `model` that was checked, an unknown setting gets a proposal.
    """
    return " ".join(mistake.sentence for mistake in mistakes_of(error, model))


def mistakes_of(error: ValidationError, model: type[BaseModel] | None = None) -> list[Mistake]:
    """Return the mistakes in the order of the model; see `sentences_of`."""
    found: dict[tuple[Place, str], list[str]] = {}
    mistakes: list[Mistake] = []
    for each in error.errors(include_url=False):
        place = _place_in(model, each["loc"])
        if each["type"] == "string_type" and isinstance(each["input"], int | float | date):
            each["type"] = "unquoted"
        cause = each.get("ctx", {}).get("error")
        if isinstance(cause, MistakesError):
            mistakes += [Mistake(place, sentence) for sentence in cause.sentences]
        elif place != each["loc"]:
            # A setting of several types: pydantic names one error for each of them.
            found.setdefault((place, "union"), []).append(_message(each["type"], each["msg"]))
        else:
            mistakes.append(Mistake(place, _sentence(each["type"], place, each["msg"], model)))
    for (place, _), messages in found.items():
        ways = ", or ".join(message.removeprefix("must be ") for message in messages)
        mistakes.append(Mistake(place, f"{'.'.join(map(str, place))} must be {ways}."))
    return mistakes


def _sentence(kind: str, place: Place, message: str, model: type[BaseModel] | None) -> str:
    path = ".".join(map(str, place))
    if kind == "extra_forbidden":
        parent, name = ".".join(map(str, place[:-1])), str(place[-1])
        end = proposal(name, _settings(model, place[:-1]), f"{parent}." if parent else "")
        if end == "." and (elsewhere := [each for each in _paths(model) if each[-1] == name]):
            end = f"; did you mean {'.'.join(elsewhere[0])}?"
        return f"unknown setting {path}{end}"
    if kind == "model_type" and (names := _settings(model, place)):
        how = f"write `{place[-1]}:` and below it, indented, lines such as `{names[0]}: …`"
        if isinstance(place[-1], int):
            how = f"write lines such as `- {names[0]}: …`"
        return f"{path} must have settings below it: {how}."
    message = _message(kind, message)
    if not path or path in message:
        return f"{message}."
    if message.startswith(("must ", "is ")):
        return f"{path} {message}."
    return f"{path}: {message[:1].lower()}{message[1:]}."


def _message(kind: str, message: str) -> str:
    """Return pydantic's message in our words, without a full stop."""
    if kind in _INSTEAD:
        return _INSTEAD[kind]
    message = message.removeprefix("Value error, ").removesuffix(".")
    if message.startswith("Input should be "):
        # Without how pydantic tried: "a valid integer, unable to parse string as an integer".
        wanted = message.removeprefix("Input should be ").partition(", unable to ")[0]
        return f"must be {wanted}"
    if kind in ("too_short", "too_long"):
        return f"must have {message.partition(' should have ')[2].partition(' after ')[0]}"
    return message


def _settings(model: type[BaseModel] | None, place: Place) -> list[str]:
    """Return the names of the settings in a section of a model."""
    kind: Any = model
    for name in place:
        kind = _inner(kind, name)
    return list(kind.model_fields) if _is_model(kind) else []


def _paths(kind: Any, start: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the places of all settings below a model, not those of lists."""
    if _is_model(kind):
        for name in kind.model_fields:
            yield (*start, name)
            yield from _paths(_inner(kind, name), (*start, name))


def _place_in(model: type[BaseModel] | None, place: Place) -> Place:
    """Return a place without the names of types that pydantic adds to it."""
    kind: Any = model
    for number, name in enumerate(place):
        if get_origin(kind) in (Union, UnionType):
            return place[:number]
        kind = _inner(kind, name)
    return place


def _inner(kind: Any, name: int | str) -> Any:
    """Return the type of what a name or number leads to; None if unknown."""
    if _is_model(kind):
        field = kind.model_fields.get(str(name))
        return None if field is None else _not_none(field.annotation)
    if get_origin(kind) in (tuple, list):
        return _not_none(get_args(kind)[0])
    if get_origin(kind) is dict:
        return _not_none(get_args(kind)[1])
    return None


def _not_none(kind: Any) -> Any:
    """Return X of `X | None`."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    others = [each for each in get_args(kind) if each is not type(None)]
    return others[0] if len(others) == 1 else kind


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
