"""What the product reaches of vLLM, read from its sources, and whether a version has it.

Kinds of reaches: names that are imported; members of imported modules and classes; calls of what is
imported; methods of vLLM's that a class of the product overrides, and members that it inherits.
Most objects come without a type. So it also looks for names of attributes that one version has
anywhere and the other nowhere, and for calls that fit a definition of one and none of the other.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.vllm.vllm_sources import (
    FUNCTIONS,
    Definition,
    Found,
    Parameters,
    Sources,
    members_of,
    parameters_of,
)

PRODUCT = ("comm_pool", "coordinator", "gateway", "kvadaptor", "worker")


@dataclass(frozen=True, order=True)
class Reach:
    """One thing that a file of the product needs of vLLM."""

    file: str
    line: int
    kind: str
    """`import`, `member`, `call`, `override`, `inherited` or `attribute`."""
    what: str
    fault: str = ""
    """Why the version does not have it; empty if it does."""


@dataclass
class Adapter:
    """A file of the product that imports vLLM."""

    path: Path
    name: str
    tree: ast.Module

    def __post_init__(self) -> None:
        """Read what its names stand for."""
        self.names: dict[str, list[tuple[str, str]]] = {}
        """Name -> what it may stand for, (module, name there); several where an import may fail."""
        self.imports: list[tuple[int, str, str, str]] = []
        """Line, module, name there and own name of each import."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "vllm":
                        own = alias.asname or alias.name
                        self._add(node.lineno, alias.name, "", own)
                        if not alias.asname:
                            self.names["vllm"] = [("vllm", "")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    self._add(node.lineno, str(node.module), alias.name, alias.asname or alias.name)

    def _add(self, line: int, module: str, name: str, own: str) -> None:
        self.imports.append((line, module, name, own))
        self.names.setdefault(own, []).append((module, name))


def adapters(root: Path) -> Iterator[Adapter]:
    """The files of the product below `root` that import vLLM."""
    for package in PRODUCT:
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_text()
            if "vllm" in text:
                adapter = Adapter(path, str(path.relative_to(root)), ast.parse(text))
                if adapter.imports:
                    yield adapter


def reaches(found: Sequence[Adapter], sources: Sources) -> list[Reach]:
    """Everything that the adapters need of this version, with what it lacks."""
    return sorted({each for adapter in found for each in _of_adapter(adapter, sources)})


def lost_attributes(found: Sequence[Adapter], old: Sources, new: Sources) -> list[Reach]:
    """Attributes that adapters use, that the old version has somewhere and the new one nowhere."""
    gone = old.attribute_names - new.attribute_names
    own = {
        name
        for adapter in found
        for node in ast.walk(adapter.tree)
        if isinstance(node, ast.ClassDef)
        for name in members_of(node)
    }
    return sorted(
        {
            Reach(adapter.name, node.lineno, "attribute", node.attr, "nothing has this name")
            for adapter in found
            for node in ast.walk(adapter.tree)
            if isinstance(node, ast.Attribute) and node.attr in gone and node.attr not in own
        }
    )


def lost_calls(found: Sequence[Adapter], old: Sources, new: Sources) -> list[Reach]:
    """Calls of objects without a type that fit a definition of the old version, and no new one."""
    lost = set()
    for adapter in found:
        for node in ast.walk(adapter.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue  # a plain name has a type
            name = node.func.attr
            before, after = old.definitions.get(name, []), new.definitions.get(name, [])
            fitted = any(not fault_of(node, each) for each in before)
            if fitted and after and all(fault_of(node, each) for each in after):
                fault = fault_of(node, after[0])
                lost.add(Reach(adapter.name, node.lineno, "attribute", f"{name}{after[0]}", fault))
    return sorted(lost)


@dataclass(frozen=True, order=True)
class Change:
    """A method of a reached class that has other parameters in the new version."""

    method: str
    file: str
    """The first file of the product that uses or overrides a method of this name."""
    old: str
    new: str


def changed_parameters(found: Sequence[Adapter], old: Sources, new: Sources) -> list[Change]:
    """Methods with other parameters: of the reached classes, if adapters use their names.

    A constructor is not among them: calls of it are reaches, and are checked.
    """
    names = {name: file for adapter in reversed(found) for name, file in _method_names(adapter)}
    changes: dict[str, Change] = {}
    for module, name in _origins(found):
        before, after = old.find(module, name), new.find(module, name)
        if before is None or after is None:
            continue
        for each, file in names.items():
            was, now = old.method(before, each), new.method(after, each)
            if was is None or now is None:
                continue
            pair = str(parameters_of(was, bound=True)), str(parameters_of(now, bound=True))
            if pair[0] != pair[1]:
                changes[f"{name}.{each}"] = Change(f"{name}.{each}", file, *pair)
    return sorted(changes.values())


def _origins(found: Sequence[Adapter]) -> list[tuple[str, str]]:
    return sorted({each for adapter in found for some in adapter.names.values() for each in some})


def _method_names(adapter: Adapter) -> Iterator[tuple[str, str]]:
    """The names of methods that a file calls or defines, constructors apart."""
    for node in ast.walk(adapter.tree):
        name = ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
        elif isinstance(node, FUNCTIONS):
            name = node.name
        if name and not name.startswith("__"):
            yield name, adapter.name


def _of_adapter(adapter: Adapter, sources: Sources) -> Iterator[Reach]:
    for line, module, name, own in adapter.imports:
        title = f"{module}.{name}".rstrip(".")
        # Of several places of a name, one is enough: the import of the others fails and is caught.
        others = [each for each in adapter.names[own] if each != (module, name)]
        has = any(_has(sources, *each) for each in [(module, name), *others])
        fault = "" if has else "no such name" if sources.module(module) else "no such module"
        yield Reach(adapter.name, line, "import", title, fault)
    for node in ast.walk(adapter.tree):
        if isinstance(node, ast.Attribute):
            yield from _member(adapter, node, sources)
        elif isinstance(node, ast.Call):
            yield from _call(adapter, node, sources)
        elif isinstance(node, ast.ClassDef):
            yield from _subclass(adapter, node, sources)


def _has(sources: Sources, module: str, name: str) -> bool:
    return (sources.find(module, name) if name else sources.module(module)) is not None


def _origin(adapter: Adapter, node: ast.expr, sources: Sources) -> Found | None:
    """What an expression of names and dots stands for, if vLLM has it."""
    if isinstance(node, ast.Name):
        for module, name in adapter.names.get(node.id, ()):
            if _has(sources, module, name):
                return sources.find(module, name) if name else Found(module, "", None)
        return None
    if isinstance(node, ast.Attribute):
        owner = _origin(adapter, node.value, sources)
        if owner is None:
            return None
        if not owner.name:
            return sources.find(owner.module, node.attr)
        if isinstance(owner.node, ast.ClassDef) and (method := sources.method(owner, node.attr)):
            return Found(owner.module, f"{owner.name}.{node.attr}", method)
    return None


def _member(adapter: Adapter, node: ast.Attribute, sources: Sources) -> Iterator[Reach]:
    owner = _origin(adapter, node.value, sources)
    if owner is None:
        return
    title = f"{owner.module}.{owner.name}".rstrip(".") + f".{node.attr}"
    if not owner.name:
        has = sources.find(owner.module, node.attr) is not None
    elif isinstance(owner.node, ast.ClassDef):
        members = sources.members(owner)
        has = members is None or node.attr in members or node.attr.startswith("__")
    else:
        return
    yield Reach(adapter.name, node.lineno, "member", title, "" if has else "no such member")


def _call(adapter: Adapter, node: ast.Call, sources: Sources) -> Iterator[Reach]:
    found = _origin(adapter, node.func, sources)
    if found is None:
        return
    parameters = sources.parameters(found)
    if parameters is None:
        return
    is_method = "." in found.name and isinstance(found.node, FUNCTIONS)
    if is_method:
        names = [ast.unparse(each) for each in getattr(found.node, "decorator_list", [])]
        if "classmethod" in names:
            parameters = parameters_of(found.node, bound=True)  # type: ignore[arg-type]
    title = f"{found.module}.{found.name}{parameters}"
    yield Reach(adapter.name, node.lineno, "call", title, fault_of(node, parameters))


def fault_of(call: ast.Call, parameters: Parameters) -> str:
    """Why a call does not fit the parameters; empty if it may."""
    names = [each.arg for each in call.keywords]
    is_open = None in names or any(isinstance(each, ast.Starred) for each in call.args)
    for name in names:
        if name is not None and name not in parameters.named and not parameters.takes_any:
            return f"no parameter {name}"
    if is_open:
        return ""
    if len(call.args) > len(parameters.positional) and not parameters.takes_more:
        return f"at most {len(parameters.positional)} by position"
    given = {*parameters.positional[: len(call.args)], *names}
    missing = [name for name in parameters.required if name not in given]
    return f"{missing[0]} is missing" if missing else ""


def _subclass(adapter: Adapter, node: ast.ClassDef, sources: Sources) -> Iterator[Reach]:
    bases = [_origin(adapter, base, sources) for base in node.bases]
    known = [base for base in bases if base is not None and isinstance(base.node, ast.ClassDef)]
    if not known or len(known) < len(node.bases):
        return
    base = known[0]
    for method in node.body:
        if not isinstance(method, FUNCTIONS) or method.name.startswith("__"):
            continue
        theirs = sources.method(base, method.name)
        if theirs is None:
            continue
        title = f"{base.module}.{base.name}.{method.name}{parameters_of(theirs, bound=True)}"
        yield Reach(adapter.name, method.lineno, "override", title, _override_fault(method, theirs))
    members = [sources.members(each) for each in known]
    own = members_of(node)
    if any(each is None for each in members):
        return
    theirs_all = set().union(*(each for each in members if each is not None))
    for each in ast.walk(node):
        if not isinstance(each, ast.Attribute) or not isinstance(each.value, ast.Name):
            continue
        if each.value.id != "self" or each.attr in own:
            continue
        has = each.attr in theirs_all
        title = f"{base.module}.{base.name}.{each.attr}"
        fault = "" if has else "no such member"
        yield Reach(adapter.name, each.lineno, "inherited", title, fault)


def _override_fault(own: Definition, theirs: Definition) -> str:
    """Why vLLM's calls of a method may not fit the product's; empty if they do."""
    ours, base = parameters_of(own, bound=True), parameters_of(theirs, bound=True)
    if not ours.takes_any:
        more = sorted(base.named - ours.named)
        if more and not ours.takes_more:
            return f"the override lacks {', '.join(more)}"
    added = [name for name in ours.required if name not in base.named]
    if added and not base.takes_any and not base.takes_more:
        return f"the override requires {added[0]}"
    return ""
