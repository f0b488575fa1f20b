"""What a Messages request may contain, on bodies of every shape."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.http.body_check import BodyFacts, check_body
from gateway.http.messages_check import TOOL_CHANGES_MAX

PATH = "/v1/messages"
ALLOWED = frozenset({"good.example"})


def check(value: Any, path: str = PATH) -> BodyFacts | ApiError:
    return check_body(json.dumps(value).encode(), ALLOWED, path)


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


@pytest.mark.parametrize(
    ("sent", "tier"),
    [(None, None), ("auto", "auto"), ("standard_only", "default")],
)
def test_tiers_are_openai_s(sent: object, tier: object) -> None:
    facts = check({"service_tier": sent})
    assert isinstance(facts, BodyFacts)
    assert facts.service_tier == tier


@pytest.mark.parametrize("sent", ["flex", "priority", "", 5, ["auto"], {}])
def test_other_tiers_are_refused(sent: object) -> None:
    error = check({"service_tier": sent})
    assert isinstance(error, ApiError)
    assert error.param == "service_tier"
    assert isinstance(check({"service_tier": sent}, "/v1/completions"), BodyFacts)


@pytest.mark.parametrize(
    ("block", "passes"),
    [
        (image(type="url", url="https://good.example/a.png"), True),
        (image(type="url", url="data:image/png;base64,AAAA"), True),
        (image(type="base64", media_type="image/png", data="AAAA"), True),
        (image(type="url", url="https://bad.example/a.png"), False),
        (image(type="url", url="https://good.example@bad.example/"), False),
        (image(type="url", url="file:///etc/passwd"), False),
        (image(type="url", url={"url": "https://good.example/"}), False),
        (image(type="url"), False),
        (image(type="file", file_id="x"), False),
        (image(url="https://bad.example/"), False),
        # A source counts wherever vLLM might read it.
        ({"type": "text", "text": "x", **image(type="url", url="http://bad.example")}, False),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_images(block: dict[str, Any], passes: bool, nested: bool) -> None:
    if nested:
        block = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    assert isinstance(check(user(block)), BodyFacts) == passes


def test_what_a_tool_gets_may_look_like_media() -> None:
    call = {"type": "tool_use", "input": {"file": "x", "image_url": "http://x", "source": {"a": 1}}}
    assert isinstance(check({"messages": [{"role": "assistant", "content": [call]}]}), BodyFacts)


def test_tools_that_a_conversation_adds_are_bounded() -> None:
    change = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}
    system = {"role": "system", "content": [change] * (TOOL_CHANGES_MAX // 2)}
    assert isinstance(check({"messages": [system, system]}), BodyFacts)
    assert isinstance(check({"messages": [system, system, system]}), ApiError)


def test_a_choice_needs_a_tool() -> None:
    change = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}
    added = {"messages": [{"role": "system", "content": [change]}]}
    tool = {"name": "f", "input_schema": {}}
    for choice, more, passes in (
        ("any", {}, False),
        ("tool", {"tools": []}, False),
        ("any", {"tools": [tool]}, True),
        ("tool", added, True),
        ("auto", {}, True),
        ("none", {}, True),
    ):
        found = check({"tool_choice": {"type": choice}, **more})
        assert isinstance(found, BodyFacts) == passes, choice


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("type", "role", "content", "source", "tool", "text", "name", "url", "edits"),
                    *("messages", "system", "tools", "tool_choice", "context_management", "keep"),
                ]
            ),
            inner
            | st.sampled_from(
                ["user", "system", "text", "image", "tool_result", "url", "any", "all"]
            ),
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=300)
@given(value=JSON)
def test_no_shape_is_a_failure_of_ours(value: Any) -> None:
    assert isinstance(check(value), BodyFacts | ApiError)
