"""Turns what a check of settings found into sentences for those who wrote them. Pure."""

import difflib
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ValidationError

SIMILAR_MIN = 0.6
"""How similar two names must be for one to be proposed for the other, from 0 to 1."""


def proposal(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return the end of a sentence about an unknown name, with the most similar known one."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=SIMILAR_MIN)
    return f"; did you mean {prefix}{found[0]}?" if found else "."


def sentences_of(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return one sentence per mistake, without the values, which may be secrets.

    With the `model` that was checked, an unknown setting gets a proposal.
    """
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return " ".join(_sentence(each["type"], each["loc"], each["msg"], model) for each in found)


def _sentence(
    kind: str, place: Sequence[int | str], message: str, model: type[BaseModel] | None
) -> str:
    path = ".".join(map(str, place))
    if kind == "extra_forbidden":
        parent = ".".join(map(str, place[:-1]))
        names = _settings(model, place[:-1])
        return f"unknown setting {path}" + proposal(
            str(place[-1]), names, f"{parent}." if parent else ""
        )
    if kind == "missing":
        return f"{path} is missing."
    if kind == "model_type":
        return f"{path} must have settings below it."
    message = message.removeprefix("Value error, ").removesuffix(".")
    if not path or path in message:
        return f"{message}."
    if message.startswith("Input should be "):
        return f"{path} must be {message.removeprefix('Input should be ')}."
    if message.startswith("must "):
        return f"{path} {message}."
    return f"{path}: {message[:1].lower()}{message[1:]}."


def _settings(model: type[BaseModel] | None, place: Sequence[int | str]) -> list[str]:
    """Return the names of the settings in a section of a model."""
    for name in place:
        if model is None or str(name) not in model.model_fields:
            return []
        inner = model.model_fields[str(name)].annotation
        model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    return list(model.model_fields) if model is not None else []
