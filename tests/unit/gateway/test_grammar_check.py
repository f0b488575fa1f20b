"""Grammars that are larger than they look."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.grammar_check import (
    REGEX_CHARS_MAX,
    SCHEMA_PROPERTIES_MAX,
    check_grammar,
    regex_states,
)


def check(value: Any) -> str | None:
    return check_grammar(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}", 3),
        ("a{2,5}b", 6),
        ("a{7,}", 7),
        ("(ab){10}", 20),
        ("((a{5}){5}){5}", 125),
        ("(a{5}){5}(b{5}){5}", 50),
        (r"\d{4}-\d{2}", 7),
        ("[a-z{5}]{3}", 3),
        (r"[\]]{3}", 3),
        ("(a|b)*", 2),
        ("a{x}", 4),
        ("a{,9}", 9),
        (")(", 1),
    ],
)
def test_states_are_counted(pattern: str, states: int) -> None:
    assert regex_states(pattern) == states


@given(st.text(alphabet="ab(){}[]\\,0123456789*+?|", max_size=60))
def test_any_text_is_counted(pattern: str) -> None:
    assert regex_states(pattern) >= 0


@pytest.mark.parametrize(
    "value",
    [
        {"regex": "((a{1,500}){1,500}){1,500}"},
        {"regex": "a" * (REGEX_CHARS_MAX + 1)},
        {"json_schema": {"schema": {"type": "string", "pattern": "(a{1000}){1000}"}}},
        {"json_schema": {"schema": {"$ref": "#"}}},
        {"json_schema": {"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}},
        {
            "json": {
                "properties": {"x": {"$ref": "#/$defs/a"}},
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            }
        },
        {"schema": {"properties": {str(n): {} for n in range(SCHEMA_PROPERTIES_MAX + 1)}}},
        [{"function": {"parameters": {"$ref": "#"}}}],
    ],
)
def test_grammars_without_bound_are_refused(value: Any) -> None:
    assert check(value) is not None


@pytest.mark.parametrize(
    "value",
    [
        {"regex": r"\d{4}-\d{2}-\d{2}T[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}"},
        {"schema": {"properties": {"a": {"$ref": "#"}, "b": {"type": "string"}}}},
        {"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}},
        {"schema": {"$ref": "#/nowhere"}},
        {"choice": ["pattern", "regex"]},
        {"pattern": 7, "properties": []},
    ],
)
def test_grammars_within_bounds_pass(value: Any) -> None:
    assert check(value) is None


def test_long_chains_of_references_are_followed_once() -> None:
    chain = {f"a{n}": {"$ref": f"#/d/a{n + 1}"} for n in range(4_000)}
    raw = json.dumps({"parameters": {"d": {**chain, "a4000": {}}}}).encode()
    began = time.process_time()
    assert check_grammar(raw) is None
    assert time.process_time() - began < 0.5
    chain["a3999"] = {"$ref": "#/d/a0"}
    assert check_grammar(json.dumps({"parameters": {"d": chain}}).encode()) is not None
