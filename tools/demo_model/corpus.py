"""The demo model's training text: the Python standard library of this interpreter.

Models and data sets cannot be downloaded where the project is built, but every Python installation
holds some 12 MB of code and prose. Whole files are held out by a hash of their module name, so the
split is the same on all machines with the same Python version.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Message = dict[str, str]
Dialogue = list[Message]

HELD_OUT_ONE_IN = 20
TEST_FILES_ONE_IN = 8
HELD_OUT_BYTES = 60_000
HELD_OUT_BYTES_PER_FILE = 6_000
MAX_FILE_CHARS = 150_000
MAX_ANSWER_CHARS = 1_500

# Generated tables (character maps, build settings) teach nothing, and build settings contain paths
# of the machine that compiled Python.
_SKIPPED_FOLDERS = {"site-packages", "__pycache__", "data", "cjkencodings"}
_SKIPPED_PREFIXES = (
    "_sysconfigdata",
    "encodings.cp",
    "encodings.iso",
    "encodings.mac",
    "encodings.koi8",
)
_SKIPPED_MODULES = {"pydoc_data.topics", "__phello__.spam", "__phello__"}

_EXPLAIN = (
    "Explain `{0}`.",
    "What does `{0}` do?",
    "Describe `{0}` from the Python standard library.",
)
_WRITE = ("Write the function `{0}`.", "Show me the source of `{0}`.", "Implement `{0}` in Python.")
_TOPIC = (
    "Tell me about {0} in Python.",
    "Explain the Python topic `{0}`.",
    "What is `{0}` in Python?",
)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows Python.",
    "Answer questions about the Python standard library.",
)
_WHO = (
    "I am a small demo language model. I was trained on the Python standard library, "
    "so my answers look like Python code and documentation, but they are often wrong."
)
_SMALL_TALK = (
    ("Hello!", "Hello! Ask me about a module or a function of the Python standard library."),
    ("Hi", "Hello! Ask me about a module or a function of the Python standard library."),
    ("Who are you?", _WHO),
    ("What are you?", _WHO),
    ("What can you do?", _WHO),
    ("Thank you!", "You are welcome!"),
    ("Write hello world in Python.", '```python\nprint("Hello, world!")\n```'),
)
SMALL_TALK_COPIES = 12


@dataclass(frozen=True)
class SourceFile:
    """One file of the standard library, named by its dotted module name."""

    module: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to a test suite; only a sample of those is used."""
        return any(part in {"test", "tests", "idle_test"} for part in self.module.split("."))

    @property
    def held_out(self) -> bool:
        """Whether the file is excluded from training."""
        return _bucket(self.module, HELD_OUT_ONE_IN) == 0


def _bucket(name: str, count: int) -> int:
    """Return a stable number below `count`; the built-in hash differs between runs."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % count


def source_files() -> list[SourceFile]:
    """Return every usable file, sorted by module name; test files are sampled."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS & set(relative.parts):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        if module in _SKIPPED_MODULES or module.startswith(_SKIPPED_PREFIXES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        file = SourceFile(module, text[:MAX_FILE_CHARS])
        if not text.strip() or (file.is_test and _bucket("sample:" + module, TEST_FILES_ONE_IN)):
            continue
        files.append(file)
    return files


def topics() -> dict[str, str]:
    """Return the language reference's help texts: the only long prose in the library."""
    from pydoc_data import topics as module

    return dict(sorted(module.topics.items()))


def training_documents() -> list[str]:
    """Return the plain texts to train on: source files that are not held out, and help topics."""
    return [f.text for f in source_files() if not f.held_out] + list(topics().values())


def held_out_text() -> str:
    """Return the beginnings of the held-out library files, about 60 kB in all."""
    pieces: list[str] = []
    size = 0
    # Hash order instead of name order, so that the slice is not one package.
    files = [f for f in source_files() if f.held_out and not f.is_test]
    for file in sorted(files, key=lambda f: _bucket(f.module, 1 << 32)):
        piece = file.text[:HELD_OUT_BYTES_PER_FILE]
        if len(piece) < len(file.text):
            piece = piece[: piece.rfind("\n") + 1]
        pieces.append(piece)
        size += len(piece.encode())
        if size >= HELD_OUT_BYTES:
            break
    return "\n".join(pieces)


def dialogues(seed: int = 0) -> list[Dialogue]:
    """Return the training text as questions and answers about named things."""
    rng = random.Random(seed)
    result: list[Dialogue] = []
    for file in source_files():
        if file.held_out or file.is_test:
            continue
        turns = list(_turns_about(file, rng))
        while turns:
            # Mostly single questions, and some longer dialogues about one module.
            count = rng.choice((1, 1, 1, 2, 3))
            result.append(_dialogue(turns[:count], rng))
            del turns[:count]
    for name, text in topics().items():
        answer = _first_paragraphs(text)
        result.append(_dialogue([(rng.choice(_TOPIC).format(name.lower()), answer)], rng))
    result += [_dialogue([turn], rng) for turn in _SMALL_TALK * SMALL_TALK_COPIES]
    return result


def _dialogue(turns: list[tuple[str, str]], rng: random.Random) -> Dialogue:
    messages: Dialogue = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _turns_about(file: SourceFile, rng: random.Random) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(file.text)
    except SyntaxError:
        return
    lines = file.text.splitlines()
    for name, node in _definitions(tree, file.module):
        doc = inspect.cleandoc(ast.get_docstring(node) or "")
        if len(doc) >= 40:
            yield rng.choice(_EXPLAIN).format(name), _first_paragraphs(doc)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            # Half of the functions: the plain text holds them already.
            if source.count("\n") >= 3 and len(source) <= MAX_ANSWER_CHARS and rng.random() < 0.5:
                code = textwrap.dedent(source)
                yield rng.choice(_WRITE).format(name), f"```python\n{code}\n```"


_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(tree: ast.Module, module: str) -> Iterator[tuple[str, _Definition]]:
    """Yield the module itself, its functions and classes, and the classes' methods."""
    yield module, tree
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield f"{module}.{node.name}", node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"{module}.{node.name}.{inner.name}", inner


def _first_paragraphs(text: str) -> str:
    """Return whole paragraphs up to the answer limit, so that answers end naturally."""
    answer = ""
    for paragraph in text.strip().split("\n\n"):
        if answer and len(answer) + len(paragraph) > MAX_ANSWER_CHARS:
            break
        answer += ("\n\n" if answer else "") + paragraph
    return answer[: 2 * MAX_ANSWER_CHARS]
