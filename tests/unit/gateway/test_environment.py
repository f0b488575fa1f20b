"""No variable of vLLM changes the app behind the edge unless the gateway passes it on."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.environment import API_KEY, DEFAULTS, FIXED, PASSED, dropped_names, settle

vllm = pytest.importorskip("vllm")

SOURCE = Path(vllm.__file__).parent
FRONT_END = ("entrypoints", "renderers", "reasoning", "tool_parsers")
"""Folders of what vLLM runs in a gateway for each request."""
READS_MIN = 25
"""Fewest variables that the search must find: one that finds none would find no fault."""


def names_read(folder: Path) -> Iterator[str]:
    """Every variable that the code of a folder reads, through vLLM's `envs` or directly."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("VLLM_"):
                yield node.attr
            elif isinstance(node, ast.Constant) and str(node.value).startswith("VLLM_"):
                name = str(node.value)
                if name.replace("_", "").isalnum():
                    yield name


def test_what_the_front_end_reads_is_dropped_or_fixed() -> None:
    read = {name for folder in FRONT_END for name in names_read(SOURCE / folder)}
    assert len(read) > READS_MIN
    assert {API_KEY, "VLLM_SERVER_DEV_MODE", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE"} <= read
    assert not read & PASSED


def test_every_variable_of_vllm_is_passed_fixed_or_dropped() -> None:
    from vllm.envs import environment_variables

    names = {name for name in environment_variables if name.startswith("VLLM_")}
    assert set(FIXED) | PASSED <= names, "vLLM does not know them"
    environment = {**dict.fromkeys(names, "theirs"), "PATH": "/bin"}
    assert set(dropped_names(environment)) == names - PASSED
    settle(environment)
    assert environment == {**dict.fromkeys(PASSED, "theirs"), "PATH": "/bin", **DEFAULTS, **FIXED}


def test_only_what_has_no_effect_is_warned_of() -> None:
    same = {**FIXED, "VLLM_PLUGINS": "mine", "VLLM_API_KEY": "", "OMP_NUM_THREADS": "4"}
    assert dropped_names(same) == []
    settle(same)
    assert same["OMP_NUM_THREADS"] == "4"
    assert "VLLM_API_KEY" not in same
