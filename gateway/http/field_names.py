"""Names of fields that an error may tell: those of the request's own models, nothing of a client's.

Where an object has keys of the client's choice, such as `logit_bias`, pydantic's location of an
error holds those keys. The way to a field is told down to the first such object. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

PARTS_MAX = 8
"""Most names and places of a way."""

_WITH_FIELDS: Final[frozenset[str]] = frozenset({"model-fields", "typed-dict", "dataclass-args"})
"""Schemas of pydantic's core that have fields of their own."""
_NOT_LOOKED_AT: Final[frozenset[str]] = frozenset({"metadata", "serialization"})


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The fields of some models."""

    known: frozenset[str]
    free: frozenset[str]
    """Those with keys of the client's choice in them."""

    def way_to(self, location: Iterable[str | int]) -> str | None:
        """Put pydantic's location into words; what is no field is a branch of a union."""
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
    """Give all fields, each with the names that it goes by."""
    if _has_fields(schema):
        fields = schema["fields"]
        named = fields.items() if isinstance(fields, dict) else ((f["name"], f) for f in fields)
        for name, field in named:
            alias = field.get("validation_alias")
            yield {name, alias} if isinstance(alias, str) else {name}, field
    for inner in _inner(schema):
        yield from _fields(inner)


def _has_free_keys(schema: Any) -> bool:
    """Say whether the client chooses keys here; models below have fields of their own."""
    if isinstance(schema, dict) and schema.get("type") == "dict":
        return True
    return not _has_fields(schema) and any(map(_has_free_keys, _inner(schema)))


def _has_fields(schema: Any) -> bool:
    kind = schema.get("type") if isinstance(schema, dict) else None
    return isinstance(kind, str) and kind in _WITH_FIELDS


def _inner(schema: Any) -> Iterable[Any]:
    if isinstance(schema, dict):
        return [value for key, value in schema.items() if key not in _NOT_LOOKED_AT]
    return schema if isinstance(schema, list | tuple) else ()
