"""Names that vLLM 0.33 has elsewhere: adapters find them in either place."""

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
OLD, NEW = "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args"


@pytest.mark.parametrize("file", ["worker/engine/config.py", "gateway/engine/app.py"])
@pytest.mark.parametrize(("there", "absent"), [(OLD, NEW), (NEW, OLD)], ids=["0.32", "0.33"])
def test_the_parser_of_options_is_found_in_either_place(
    file: str, there: str, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the adapter's own import statement where one of the modules is absent."""
    for name in (
        "vllm",
        "vllm.entrypoints",
        "vllm.entrypoints.launchers",
        "vllm.entrypoints.common",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType(there)
    module.make_arg_parser = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, there, module)
    monkeypatch.setitem(sys.modules, absent, None)
    statements: list[ast.stmt] = [
        node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.Try)
    ]
    assert len(statements) == 1
    names: dict[str, object] = {}
    exec(compile(ast.Module(statements, []), file, "exec"), names)
    assert names["make_arg_parser"] is module.make_arg_parser
