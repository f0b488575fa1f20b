"""The words of names and prose: what they may not contain, in the product and its documents."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "coordinator", "worker", "comm_pool", "kvadaptor", "loadgen", "tools")
NAME_WORDS = frozenset(
    {
        *(
            "told",
            "said",
            "came",
            "gathered",
            "shown",
            "kept",
            "seen",
            "measured",
            "judged",
            "left",
        ),
        *("foreseen", "bereaved", "looked", "restored", "brought", "behind", "born"),
        *("seat", "seats", "herald", "pulse", "outlet", "outcast"),
    }
)
"""Participles that stand for things, and words that the glossary replaces."""
PROSE = {
    "behind": r"\bbehind\b(?! (?:a|the|one|its|our) (?:proxy|load balancer|gateway|same gateways))",
    "told": r"\btold\b",
    "so many": r"\bso many\b",
    "so long": r"\bso long\b",
    "what was": r"\bwhat was\b",
    "whoever": r"\bwhoever\b",
    "as good as": r"\bas good as\b",
    "all the same": r"\ball the same\b",
    "say whether": r"\bsays? whether\b",
    "way out": r"\bway out\b",
    "let out": r"\blet out\b",
}
DOCUMENTS = ("*.md", "docs/*.md", "docs/adr/*.md", "loadgen/*.md", "tools/**/*.md")


def python_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def words_of(name: str) -> set[str]:
    """Return the words of a name in any case."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def names_in(module: ast.Module) -> Iterator[str]:
    """Yield every name that a module gives to something."""
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def prose_of(source: str) -> str:
    """Return the docstrings, strings and comments of a module, each line break a space."""
    module = ast.parse(source)
    texts = [
        node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [token.string[1:] for token in tokens if token.type == tokenize.COMMENT]
    return " ".join(" ".join(texts).split())


def prose() -> Iterator[tuple[str, str]]:
    """Yield each file's name and prose."""
    for path in python_files():
        yield str(path.relative_to(ROOT)), prose_of(path.read_text())
    for pattern in DOCUMENTS:
        for path in ROOT.glob(pattern):
            yield str(path.relative_to(ROOT)), " ".join(path.read_text().split())


def test_names_use_the_glossary() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files()
        for name in names_in(ast.parse(path.read_text()))
        if words_of(name) & NAME_WORDS
    }
    assert not found, "use the words of ARCHITECTURE.md in these names"


def test_prose_has_no_old_phrases() -> None:
    found = [
        f"{name}: {phrase}"
        for name, text in prose()
        for phrase, pattern in PROSE.items()
        if re.search(pattern, text, re.IGNORECASE)
    ]
    assert not found, "write these another way"


def test_words_are_found() -> None:
    """What the two tests above search with does find something."""
    assert words_of("_isToldBy2") >= {"told", "by2"}
    module = (
        "class Told:\n    '''What was told.'''\n"
        "    x = f'so {1} many'  # behind a proxy, behind a step\n"
    )
    assert set(names_in(ast.parse(module))) == {"Told", "x"}
    assert prose_of(module) == "What was told. so many behind a proxy, behind a step"
    assert len(re.findall(PROSE["behind"], prose_of(module))) == 1
