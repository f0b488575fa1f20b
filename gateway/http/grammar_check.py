"""Which grammars a request may contain: those of bounded size when expanded.

A regular expression of twenty characters can stand for an automaton of millions of states, and a
schema can refer only to itself. Compiling either blocks the gateway or fails on a rank. Called by
the body check. Pure.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

REGEX_CHARS_MAX = 4_096
REGEX_STATES_MAX = 20_000
"""Approximate limit on the states of one regular expression's automaton."""

SCHEMA_PROPERTIES_MAX = 1_000
"""Most named properties of one schema, over all its levels."""

_COUNT = re.compile(r"\{(\d{0,9})(,?)(\d{0,9})\}")
REF_CHARS_MAX = 512
"""Longest reference that is followed."""
_REGEX_KEYS = frozenset({"pattern", "regex"})
_SCHEMA_KEYS = ("schema", "parameters", "json", "input_schema")
_FOREIGN_SCHEMA = re.compile(rb'"\$ref"\s*:\s*"(?!#)')


def check_schemas(raw: bytes) -> str | None:
    """Return the fault in the schemas and grammars of a parameter, as the end of a sentence."""
    if _FOREIGN_SCHEMA.search(raw):
        return "may refer to schemas of its own only ($ref: #…)"
    return check_grammar(raw) if raw[:1] in (b"{", b"[") else None


def check_grammar(raw: bytes) -> str | None:
    """Return the fault in the grammars of a parameter's JSON, as the end of a sentence."""
    if not any(word in raw for word in (b"pattern", b"regex", b"$ref", b"ropert", b"\\u")):
        return None
    value = msgspec.json.decode(raw)
    properties = 0
    for node in _objects(value):
        for key in _REGEX_KEYS & node.keys():
            if isinstance(node[key], str) and (reason := _check_regex(node[key])):
                return reason
        named = node.get("properties")
        properties += len(named) if isinstance(named, dict) else 0
        schemas = (node.get(key) for key in _SCHEMA_KEYS)
        if any(isinstance(schema, dict) and _refers_to_itself(schema) for schema in schemas):
            return "has a schema that refers to nothing but itself"
    if properties > SCHEMA_PROPERTIES_MAX:
        return f"may have {SCHEMA_PROPERTIES_MAX} properties at most"
    return None


def regex_states(pattern: str) -> int:
    """Return the approximate number of states of a regular expression's automaton."""
    # `sums`: states so far, one entry per open group; `last`: of the last repeatable item.
    sums, last, place = [0], 0, 0
    while place < len(pattern):
        char = pattern[place]
        place += 1
        if char == "(":
            sums[-1] += last
            sums.append(0)
            last = 0
        elif char == ")" and len(sums) > 1:
            last += sums.pop()
        elif char == "{" and (count := _COUNT.match(pattern, place - 1)):
            last *= max([int(number) for number in count.group(1, 3) if number] or [1])
            place = count.end()
        elif char not in "*+?|^$":
            sums[-1] += last
            place = _end_of_atom(pattern, char, place)
            last = 1
    return sum(sums) + last


def _end_of_atom(pattern: str, char: str, place: int) -> int:
    if char == "\\":
        return place + 1
    if char == "[":
        while place < len(pattern) and pattern[place] != "]":
            place += 2 if pattern[place] == "\\" else 1
        return place + 1
    return place


def _check_regex(pattern: str) -> str | None:
    if len(pattern) > REGEX_CHARS_MAX:
        return f"may have {REGEX_CHARS_MAX} characters per regular expression at most"
    if regex_states(pattern) > REGEX_STATES_MAX:
        return f"may repeat to {REGEX_STATES_MAX} states per regular expression at most"
    return None


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object at any depth; the caller has bounded the nesting."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from _objects(inner)


def _refers_to_itself(schema: dict[str, Any]) -> bool:
    """Return whether a reference leads back to itself over references alone; linear."""
    cleared: set[str] = set()
    for node in _objects(schema):
        chain: set[str] = set()
        at: Any = node
        while isinstance(at, dict) and isinstance(reference := at.get("$ref"), str):
            if reference in chain:
                return True
            if reference in cleared or len(reference) > REF_CHARS_MAX:
                break
            chain.add(reference)
            at = _resolve(schema, reference)
        cleared |= chain
    return False


def _resolve(schema: dict[str, Any], reference: str) -> Any:
    at: Any = schema
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            at = (
                at.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(at, dict) else None
            )
    return at
