"""The log events that the product's source names, with their levels and packages."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("comm_pool", "coordinator", "gateway", "kvadaptor", "worker")
LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
}
ANNOUNCED = "stdout"
"""Stands for the level of a line on stdout."""
NOTES = {"note": "info", "warning": "warning"}
"""The core's functions that make an event to log."""


@dataclass(frozen=True, order=True)
class LogEvent:
    """An event as the code logs it."""

    name: str
    package: str
    level: str


def events_of_code() -> set[LogEvent]:
    """Every call that logs an event by name."""
    return {
        LogEvent(name, package, level)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name, level in _events_in(ast.parse(path.read_text()))
    }


def _events_in(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Dict):
            yield from ((name, ANNOUNCED) for name in _announced_by(node))
        if not isinstance(node, ast.Call) or not node.args:
            continue
        match node.func, node.args[0]:
            case (
                ast.Attribute(value=ast.Name(id="log" | "_log"), attr=method),
                ast.Constant(value=str(name)),
            ) if method in LEVELS:
                yield name, LEVELS[method]
            case ast.Name(id="announce"), ast.Constant(value=str(name)):
                yield name, ANNOUNCED
            case ast.Name(id=function), ast.Constant(value=str(name)) if function in NOTES:
                yield name, NOTES[function]


def _announced_by(fields: ast.Dict) -> Iterator[str]:
    """The event of an object that is printed as a line of JSON."""
    for key, value in zip(fields.keys, fields.values, strict=True):
        match key, value:
            case ast.Constant(value="event"), ast.Constant(value=str(name)):
                yield name


def unnamed_events() -> list[str]:
    """Calls of a logger whose event is no constant, which the catalogue cannot list."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("log", "_log")
        and node.func.attr in LEVELS
        and not isinstance(node.args[0], ast.Constant)
    ]
