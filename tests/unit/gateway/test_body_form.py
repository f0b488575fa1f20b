"""Bodies in the form that vLLM takes."""

import json
from typing import Any

import pytest

from gateway.http.body_check import BodyFacts, check_body
from gateway.http.body_form import may_need_rewrite, rewrite


def rewritten(fields: dict[str, Any]) -> Any:
    return json.loads(rewrite(json.dumps(fields).encode()))


def test_null_members_go() -> None:
    fields = {
        "n": None,
        "messages": [{"role": "user", "content": "x", "name": None, "tool_calls": None}],
        "tools": [{"type": "function", "function": {"name": "f", "strict": None}}],
        "stream_options": None,
    }
    assert rewritten(fields) == {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "assistant", "content": None}]},
        {"tools": [{"function": {"parameters": {"default": None, "enum": [None]}}}]},
        {"response_format": {"json_schema": {"schema": {"const": None}}}},
        {"messages": [{"content": [{"type": "tool_use", "input": {"x": None}}]}]},
        {"metadata": {"x": None}, "logit_bias": {"1": None}},
        {"prompt": [1, None]},
    ],
)
def test_null_that_means_something_stays(fields: dict[str, Any]) -> None:
    assert rewritten(fields) == fields


@pytest.mark.parametrize("top_p", [0, 0.0])
def test_top_p_of_0_is_the_likeliest_token(top_p: float) -> None:
    assert may_need_rewrite(b"{}", top_p)
    assert rewritten({"top_p": top_p, "top_k": 50}) == {"top_p": 1.0, "top_k": 1}
    assert rewritten({"top_p": 0.1}) == {"top_p": 0.1}


def test_other_bodies_stay_as_they_are() -> None:
    body = b'{"prompt" : "x", "top_p":0.5}'
    facts = check_body(body, frozenset())
    assert isinstance(facts, BodyFacts)
    assert facts.body is body
