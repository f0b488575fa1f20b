"""The sources of one version of vLLM, parsed without importing them: names, members, parameters."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from pydantic import BaseModel

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEPTH_MAX = 12
"""How many modules a name may be passed on through."""


@dataclass(frozen=True)
class Found:
    """Where a name is defined: its module, and its definition if it is a function or class."""

    module: str
    name: str
    node: ast.AST | None


@dataclass(frozen=True)
class Parameters:
    """What a call may give."""

    positional: tuple[str, ...]
    required: tuple[str, ...]
    """Without a default, by position or by name."""
    named: frozenset[str]
    takes_more: bool
    """`*args`."""
    takes_any: bool
    """`**kwargs`."""

    def __str__(self) -> str:
        """As in a definition, without annotations; `=` marks those with a default."""
        names = [*self.positional, *sorted(self.named.difference(self.positional))]
        shown = [name if name in self.required else f"{name}=" for name in names]
        shown += ["*"] * self.takes_more + ["**"] * self.takes_any
        return f"({', '.join(shown)})"


@dataclass
class Module:
    """The names that a module has, and where those that it imports come from."""

    name: str
    tree: ast.Module
    is_package: bool
    defined: dict[str, ast.AST] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name -> (module, name there); the latter is empty for a module."""
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read the names."""
        for node in _top_level(self.tree.body):
            self._read(node)

    def _read(self, node: ast.AST) -> None:
        if isinstance(node, Definition):
            self.defined.setdefault(node.name, node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for each in ast.walk(target):
                    if isinstance(each, ast.Name):
                        self.defined.setdefault(each.id, node)
            self._read_lazy(node)
        elif isinstance(node, ast.AnnAssign):
            target = node.target
            if isinstance(target, ast.Name):
                self.defined.setdefault(target.id, node)
        else:
            self._read_import(node)

    def _read_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.imported[alias.asname or alias.name.split(".")[0]] = (alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            source = self.absolute(node)
            for alias in node.names:
                if alias.name == "*":
                    self.stars.append(source)
                else:
                    self.imported[alias.asname or alias.name] = (source, alias.name)

    def _read_lazy(self, node: ast.Assign) -> None:
        """Read a table of names that a package imports when they are asked for."""
        names = [each.id for each in node.targets if isinstance(each, ast.Name)]
        if names != ["MODULE_ATTRS"] or not isinstance(node.value, ast.Dict):
            return
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                module, _, name = str(value.value).partition(":")
                self.imported[str(key.value)] = (f"{self.name}{module}", name)

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that a relative import names."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _top_level(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The statements of a module, also those under conditions."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(node, Definition):
                yield from _top_level(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from _top_level(handler.body)


class Sources:
    """A folder that holds the package `vllm`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """The module; None if there is none."""
        if name not in self._modules:
            path = self.folder.joinpath(*name.split("."))
            package, file = path / "__init__.py", path.with_suffix(".py")
            source = package if package.exists() else file
            self._modules[name] = (
                Module(name, ast.parse(source.read_text()), source is package)
                if source.exists()
                else None
            )
            if self._modules[name] is None and path.is_dir():
                self._modules[name] = Module(name, ast.parse(""), is_package=True)
        return self._modules[name]

    def find(self, module_name: str, name: str, depth: int = 0) -> Found | None:
        """Where a module's name is defined; outside of vLLM its own module counts."""
        module = self.module(module_name)
        if module is None or depth > DEPTH_MAX:
            return None
        if name in module.defined:
            return Found(module_name, name, module.defined[name])
        if name in module.imported:
            source, inner = module.imported[name]
            if not source.startswith("vllm"):
                return Found(module_name, name, None)
            if not inner:
                return Found(source, "", None) if self.module(source) else None
            return self.find(source, inner, depth + 1)
        if self.module(f"{module_name}.{name}") is not None:
            return Found(f"{module_name}.{name}", "", None)
        for source in module.stars:
            if (found := self.find(source, name, depth + 1)) is not None:
                return found
        return None

    def bases(self, found: Found, depth: int = 0) -> Iterator[tuple[Found | None, str]]:
        """A class and all that it derives from; None, with the name, for others' classes."""
        yield found, found.name
        if not isinstance(found.node, ast.ClassDef) or depth > DEPTH_MAX:
            return
        for base in found.node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            name = ast.unparse(plain)
            source = self.find(found.module, name) if "." not in name else None
            if source is None or not isinstance(source.node, ast.ClassDef):
                yield None, name
            else:
                yield from self.bases(source, depth + 1)

    def members(self, found: Found) -> set[str] | None:
        """The names that a class's instances have; None if one of its bases is not vLLM's."""
        names: set[str] = set()
        complete = True
        for each, name in self.bases(found):
            if each is None:
                complete = complete and name in KNOWN_BASES
                names |= KNOWN_BASES.get(name, set())
            elif isinstance(each.node, ast.ClassDef):
                names |= members_of(each.node)
        return names if complete else None

    def method(self, found: Found, name: str) -> Definition | None:
        """The definition of a class's method, its own or that of a base."""
        for each, _ in self.bases(found):
            for node in each.node.body if each and isinstance(each.node, ast.ClassDef) else ():
                if isinstance(node, FUNCTIONS) and node.name == name:
                    return node
        return None

    def parameters(self, found: Found) -> Parameters | None:
        """What a call of a function or class may give; None if that cannot be known."""
        if isinstance(found.node, FUNCTIONS):
            return None if decorated(found.node) else parameters_of(found.node)
        if not isinstance(found.node, ast.ClassDef):
            return None
        init = self.method(found, "__init__")
        if init is not None:
            return parameters_of(init, bound=True)
        return None if self.method(found, "__new__") else self._fields(found)

    def _fields(self, found: Found) -> Parameters | None:
        """The fields of a dataclass, in order; None if a base is not vLLM's."""
        order: dict[str, bool] = {}
        for each, _ in reversed(list(self.bases(found))):
            if each is None or not isinstance(each.node, ast.ClassDef):
                return None
            if not is_dataclass(each.node):
                return None
            for node in each.node.body:
                if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                    continue
                if "ClassVar" not in ast.unparse(node.annotation):
                    order[node.target.id] = node.value is not None
        required = tuple(name for name, has_default in order.items() if not has_default)
        return Parameters(tuple(order), required, frozenset(order), False, False)

    @property
    def attribute_names(self) -> frozenset[str]:
        """Every name that some module, class or instance of vLLM has."""
        return self._everything[0]

    @property
    def definitions(self) -> dict[str, list[Parameters]]:
        """The parameters of all functions and methods by name, of methods without the first."""
        return self._everything[1]

    @cached_property
    def _everything(self) -> tuple[frozenset[str], dict[str, list[Parameters]]]:
        names: set[str] = set()
        definitions: dict[str, list[Parameters]] = defaultdict(list)
        for path in sorted((self.folder / "vllm").rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, Definition):
                    names.add(node.name)
                if isinstance(node, FUNCTIONS):
                    first = [each.arg for each in (*node.args.posonlyargs, *node.args.args)][:1]
                    is_bound = first in (["self"], ["cls"])
                    definitions[node.name].append(parameters_of(node, bound=is_bound))
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names.add(node.attr)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
        return frozenset(names), definitions


_MODULE = frozenset(dir(torch.nn.Module))
KNOWN_BASES: dict[str, set[str]] = {
    "object": set(),
    "ABC": set(),
    "Generic": set(),
    "Protocol": set(),
    "Enum": {"name", "value"},
    "nn.Module": set(_MODULE),
    "torch.nn.Module": set(_MODULE),
    "Module": set(_MODULE),
    "BaseModel": set(dir(BaseModel)),
}
"""Classes of others whose members are known."""


def members_of(node: ast.ClassDef) -> set[str]:
    """The names that a class itself gives: methods, fields, and what its methods set."""
    names: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, Definition):
            names.add(each.name)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            names.add(each.attr)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
        elif isinstance(each, ast.Call) and ast.unparse(each.func).startswith("self.register_"):
            names |= {str(word.value) for word in each.args[:1] if isinstance(word, ast.Constant)}
    return names


def decorated(node: Definition) -> bool:
    """Whether a decorator may change the parameters."""
    plain = {"staticmethod", "classmethod", "property", "abstractmethod", "cache", "lru_cache"}
    plain |= {"contextmanager", "override", "functools.cache", "overload", "torch.inference_mode"}
    return any(
        ast.unparse(each.func if isinstance(each, ast.Call) else each) not in plain
        for each in node.decorator_list
    )


def is_dataclass(node: ast.ClassDef) -> bool:
    """Whether a decorator makes the parameters out of the fields."""
    names = [
        ast.unparse(each.func if isinstance(each, ast.Call) else each)
        for each in node.decorator_list
    ]
    return any(name.split(".")[-1] in ("dataclass", "config") for name in names)


def parameters_of(node: Definition, *, bound: bool = False) -> Parameters:
    """The parameters of a definition; of a bound method without the first."""
    assert isinstance(node, FUNCTIONS)
    given = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    without = len(given) - len(node.args.defaults)
    required = [*given[:without]]
    required += [
        each.arg
        for each, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if default is None
    ]
    if bound:
        required = [name for name in required if name != given[0]]
        given = given[1:]
    named = {*given, *(each.arg for each in node.args.kwonlyargs)}
    return Parameters(
        tuple(given),
        tuple(required),
        frozenset(named),
        node.args.vararg is not None,
        node.args.kwarg is not None,
    )
