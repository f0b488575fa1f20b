"""Small changes to a module's functions, one at a time, in a fixed order.

Only what runs inside of functions is changed: not docstrings, annotations, the texts of errors,
`__slots__`, nor assertions, which are checks themselves. Every change gives other source text; a
change that cannot be told from the original by any caller is possible, and is listed where known.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

SWAPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
CALLS = {"max": "min", "min": "max", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One changed function: where, what was changed, and the module with the change."""

    line: int
    what: str
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module, in order of its source."""
    tree = ast.parse(source)
    for index, node in enumerate(_nodes(tree)):
        for what, change in _changes(node):
            changed = copy.deepcopy(tree)
            change(_nodes(changed)[index])
            ast.fix_missing_locations(changed)
            yield Mutant(getattr(node, "lineno", 0), what, changed)


def _nodes(tree: ast.Module) -> list[ast.AST]:
    """The nodes inside of functions that may be changed; the same order for equal trees."""
    found: list[ast.AST] = []

    def walk(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.AnnAssign) and not (
            isinstance(node, ast.AnnAssign) and inside and node.value is not None
        ):
            return
        if inside:
            found.append(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "pattern"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    is_body = isinstance(node, ast.FunctionDef) and name == "body"
                    walk(child, inside or is_body)

    walk(tree, inside=False)
    return found


Change = tuple[str, Callable[[Any], None]]


def _changes(node: Any) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                for other in SWAPPED.get(type(op), ()):
                    what = f"{type(op).__name__} -> {other.__name__}"
                    yield what, partial(_set_comparison, place, other)
        case ast.BoolOp() | ast.BinOp():
            yield from _other_operator(node)
        case ast.AugAssign():
            yield from _other_operator(node)
            yield "statement removed", _remove
        case ast.Expr(value=ast.Call(func=func)) if "integrity" not in ast.unparse(func):
            yield "statement removed", _remove
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "assignment removed", _remove
        case ast.UnaryOp(op=ast.Not()):
            yield "not removed", _without_not
        case _:
            yield from _other_value(node)


def _other_operator(node: Any) -> Iterator[Change]:
    for other in SWAPPED.get(type(node.op), ()):
        what = f"{type(node.op).__name__} -> {other.__name__}"
        yield what, partial(_set_operator, other)


def _other_value(node: Any) -> Iterator[Change]:
    match node:
        case ast.Constant(value=bool(value)):
            yield f"{value} -> {not value}", lambda new: setattr(new, "value", not new.value)
        case ast.Constant(value=int(value)):
            yield f"{value} -> {value + 1}", lambda new: setattr(new, "value", new.value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            other = CALLS[name]
            yield f"{name} -> {other}", lambda new: setattr(new.func, "id", other)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
                yield "condition negated", _negate
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "returns None", lambda new: setattr(new, "value", ast.Constant(None))


def _set_comparison(place: int, other: type[ast.AST], new: Any) -> None:
    new.ops[place] = other()


def _set_operator(other: type[ast.AST], new: Any) -> None:
    new.op = other()


def _negate(new: ast.AST) -> None:
    assert isinstance(new, ast.If | ast.While | ast.IfExp)
    new.test = ast.UnaryOp(ast.Not(), new.test)


def _without_not(new: ast.AST) -> None:
    assert isinstance(new, ast.UnaryOp)
    # `not not x` is x where only its truth counts.
    new.operand = ast.UnaryOp(ast.Not(), new.operand)


def _remove(new: ast.AST) -> None:
    """Make a statement one that does nothing; its fields stay for the tree's sake."""
    _become(new, ast.Pass())


def _become(node: ast.AST, other: ast.AST) -> None:
    line = {name: getattr(node, name) for name in ("lineno", "col_offset")}
    node.__class__ = other.__class__
    node.__dict__.clear()
    node.__dict__.update(line)
