"""Field names that an error may contain: those of the request models, never a client's keys.

If an object has keys of the client's choice, such as `logit_bias`, pydantic's location of an error
contains those keys. The path to a field stops at the first such object. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

PARTS_MAX = 8
"""Most names and indices of a path."""

_WITH_FIELDS: Final[frozenset[str]] = frozenset({"model-fields", "typed-dict", "dataclass-args"})
"""Schemas of pydantic's core that have named fields."""
_IGNORED_KEYS: Final[frozenset[str]] = frozenset({"metadata", "serialization"})


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The fields of some models."""

    known: frozenset[str]
    free: frozenset[str]
    """Fields that contain keys of the client's choice."""

    def path_to(self, location: Iterable[str | int]) -> str | None:
        """Return pydantic's location as a dotted path, without the branches of unions."""
        parts: list[str] = []
        for part in location:
            if isinstance(part, int) or part in self.known:
                parts.append(str(part))
            if part in self.free or len(parts) == PARTS_MAX:
                break
        return ".".join(parts) or None


def field_names(core_schemas: Iterable[Any]) -> FieldNames:
    """Collect the fields from the schemas that pydantic has made of models."""
    known: set[str] = set()
    free: set[str] = set()
    for names, field in _fields(list(core_schemas)):
        known |= names
        if _has_free_keys(field["schema"]):
            free |= names
    return FieldNames(frozenset(known), frozenset(free))


def _fields(schema: Any) -> Iterator[tuple[set[str], dict[str, Any]]]:
    """Yield all fields, each with its names."""
    if _has_fields(schema):
        fields = schema["fields"]
        named = fields.items() if isinstance(fields, dict) else ((f["name"], f) for f in fields)
        for name, field in named:
            alias = field.get("validation_alias")
            yield {name, alias} if isinstance(alias, str) else {name}, field
    for inner in _inner(schema):
        yield from _fields(inner)


def _has_free_keys(schema: Any) -> bool:
    """Return whether the client chooses keys here, not counting nested models."""
    if isinstance(schema, dict) and schema.get("type") == "dict":
        return True
    return not _has_fields(schema) and any(map(_has_free_keys, _inner(schema)))


def _has_fields(schema: Any) -> bool:
    kind = schema.get("type") if isinstance(schema, dict) else None
    return isinstance(kind, str) and kind in _WITH_FIELDS


def _inner(schema: Any) -> Iterable[Any]:
    if isinstance(schema, dict):
        return [value for key, value in schema.items() if key not in _IGNORED_KEYS]
    return schema if isinstance(schema, list | tuple) else ()
