"""Answers 400 where a request's shape makes vLLM's own validators fail.

vLLM's request models look into raw JSON before pydantic has checked it: a list where they expect an
object raises an exception of Python's, and the client would get a 500. A guard around each body's
validation finds the parameter that causes it. Called when the application is built.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fastapi.routing import APIRoute

_OF_SHAPE: Final = (LookupError, AttributeError, AssertionError, TypeError)
"""What Python raises for data of an unexpected shape."""
_LONG: Final = ("messages", "input", "prompt")
"""Parameters that may be long lists; one item of them is enough to find a fault elsewhere."""
_INTEGERS: Final = range(-(2**63), 2**63)
"""Numbers that travel to the ranks; vLLM fails on others where it sends them."""
_TOO_LARGE: Final = "the number has more than 64 bits"
_TEXT: Final = "the value has a form that this server cannot read"

Errors = list[dict[str, Any]]
Validate = Callable[..., tuple[Any, Errors]]


def guard_bodies(route: APIRoute) -> None:
    """Guard the validation of a route's body."""
    for field in route.dependant.body_params:
        field.validate = partial(_validate, field.validate)  # type: ignore[method-assign]


def _validate(
    validate: Validate, value: Any, values: Any = None, *, loc: tuple[int | str, ...] = ()
) -> tuple[Any, Errors]:
    """Take the place of FastAPI's `ModelField.validate`."""
    if (name := _find_large_number(value)) is not None:
        error = {"type": "value_error", "loc": (*loc, name), "msg": _TOO_LARGE, "input": None}
        return None, [error]
    try:
        return validate(value, values or {}, loc=loc)
    except _OF_SHAPE:
        culprit = _find_culprit(validate, value)
        where = loc if culprit is None else (*loc, culprit)
        return None, [{"type": "value_error", "loc": where, "msg": _TEXT, "input": None}]


def _find_large_number(value: Any) -> str | None:
    """Return the first parameter that is an integer of more than 64 bits."""
    if not isinstance(value, dict):
        return None
    for name, each in value.items():
        if isinstance(each, int) and each not in _INTEGERS:
            return str(name)
    return None


def _find_culprit(validate: Validate, value: Any) -> str | None:
    """Return the parameter without which the body can be validated, if there is one."""
    if not isinstance(value, dict):
        return None
    short: dict[str, Any] = {
        name: each[:1] if name in _LONG and isinstance(each, list) else each
        for name, each in value.items()
    }
    if not _has_odd_shape(validate, short):
        return next((name for name in _LONG if isinstance(value.get(name), list)), None)
    for name in sorted(short, key=_suspicion):
        if not _has_odd_shape(validate, {key: short[key] for key in short if key != name}):
            return name
    return None


def _suspicion(name: str) -> tuple[bool, bool]:
    """Order parameters: the ones that others refer to first, those of much text last."""
    return name in _LONG, name == "tool_choice"


def _has_odd_shape(validate: Validate, value: Any) -> bool:
    try:
        validate(value, {}, loc=())
    except _OF_SHAPE:
        return True
    except Exception:  # noqa: BLE001 -- whatever a rule raises
        # A rule of vLLM's that the shortened body breaks; its shape is one that vLLM can read.
        return False
    return False
