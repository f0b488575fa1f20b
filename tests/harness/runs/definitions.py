"""What a module of tests defines, so that tables and documents can be checked against it."""

import ast
from functools import cache
from pathlib import Path


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return what a module defines at its top level."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)
