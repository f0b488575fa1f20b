"""The parts of a request's body, and bodies that differ in one of them."""

from collections.abc import Iterator
from typing import Any

Way = tuple[Any, ...]
"""The names and indices that lead to a part."""


def parts_of(value: Any, way: Way = ()) -> Iterator[Way]:
    """The ways to all members and items, at any depth."""
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*way, name)
        if isinstance(each, dict | list):
            yield from parts_of(each, (*way, name))


def copy_with(value: Any, way: Way, new: Any) -> Any:
    """A copy in which one part is replaced; the other parts are shared."""
    if not way:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    inner = copied.get(way[0]) if isinstance(copied, dict) else copied[way[0]]
    copied[way[0]] = copy_with(inner, way[1:], new)
    return copied
