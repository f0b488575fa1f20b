"""Rules about the source text itself: sizes, names, imports of the engine, what may be said."""

import ast
import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "coordinator", "worker", "comm_pool", "kvadaptor", "loadgen")
DISTRIBUTION = "aileron-serving"

FUNCTION_LINES_MAX = 70
FILE_LINES_TYPICAL_MAX = 500
"""A longer file has its reason in `LONG_FILES`."""
FILE_LINES_MAX = 700
LONG_FILES: dict[str, str] = {}
"""Why each file of more than `FILE_LINES_TYPICAL_MAX` lines is not two; entries only leave."""
TOP_MODULES_MAX = 8
"""Modules at a package's top besides `__init__` and `__main__`; more of them want rooms."""
FILES_MIN = 700
"""So many there are at least: a search that finds nothing would find no fault either."""
TEXT_BYTES_MAX = 1024 * 1024
"""Larger files are data."""
BANNED_NAMES = frozenset({"utils.py", "util.py", "helpers.py", "common.py", "misc.py"})
SHADOWING_NAMES = frozenset({"types.py", "queue.py", "select.py", "signal.py", "logging.py"})
ENGINE_PACKAGES = frozenset({"vllm"})
ENGINE_FOLDER = "engine"
ENGINE_ADAPTERS = (
    "comm_pool/cpu/plane_group.py",
    "comm_pool/cuda/collective_abort.py",
    "comm_pool/pool.py",
    "comm_pool/stages/group.py",
    "kvadaptor/translate.py",
    "kvadaptor/views.py",
)
TEST_FOLDERS = frozenset(
    {"contract", "docs", "gpu", "install", "integration", "property", "rules", "unit"}
)
MAY_IMPORT_BENCHMARKS = ("tests/bench/", "tests/unit/bench/", "tests/soak/")
"""A soak is set up as a benchmark on GPUs is, and says as that does where it ran."""
"""To be emptied: nothing is to be added."""
# Put together here, so that this file does not hold them itself.
BANNED_TEXTS = ("/" + "work" + "/", ".." + "/shared", "/" + "opt/wheels", "/" + "root/")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


PRODUCT = python_files(*PACKAGES)
EVERYTHING = [*PRODUCT, *python_files("tests", "tools")]


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """The statements under a node, at any depth; expressions hold none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements_of(child)


class File:
    """What the rules look at in one file."""

    def __init__(self, path: Path) -> None:
        source = path.read_text()
        module = ast.parse(source)
        self.lines = len(source.splitlines())
        self.has_docstring = bool(ast.get_docstring(module))
        self.imports: set[str] = set()
        """Modules, and the names that are imported from them, with dots."""
        self.functions: dict[str, int] = {}
        """Name -> lines."""
        for node in statements_of(module):
            if isinstance(node, ast.Import):
                self.imports |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                self.imports |= {node.module, *names}
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                self.functions[node.name] = max(lines, self.functions.get(node.name, 0))


@cache
def file_of(path: Path) -> File:
    return File(path)


def text_files() -> Iterator[Path]:
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            each
            for each in subfolders
            if each in {".ci", ".github"}
            or not (each.startswith(".") or each in {"__pycache__", "build", "dist"})
        ]
        for name in names:
            path = Path(folder, name)
            if name != ".git" and path.stat().st_size <= TEXT_BYTES_MAX:
                yield path


def test_files_are_short() -> None:
    lines = {name_of(path): file_of(path).lines for path in EVERYTHING}
    assert len(lines) > FILES_MIN
    assert not {name: count for name, count in lines.items() if count > FILE_LINES_MAX}
    long = {name for name, count in lines.items() if count > FILE_LINES_TYPICAL_MAX}
    assert long == set(LONG_FILES)


def test_functions_are_short() -> None:
    long = [
        f"{name_of(path)}: {name} ({lines} lines)"
        for path in EVERYTHING
        for name, lines in file_of(path).functions.items()
        if lines > FUNCTION_LINES_MAX
    ]
    assert not long


def test_few_modules_stand_at_the_top_of_a_package() -> None:
    for package in PACKAGES:
        found = [path.name for path in (ROOT / package).glob("*.py") if path.stem[:2] != "__"]
        assert len(found) <= TOP_MODULES_MAX, (package, sorted(found))


def test_modules_say_what_they_are() -> None:
    assert not [name_of(path) for path in PRODUCT if not file_of(path).has_docstring]


def test_files_have_telling_names() -> None:
    assert not [
        name_of(path)
        for path in EVERYTHING
        if path.name in BANNED_NAMES | SHADOWING_NAMES or "manager" in path.name
    ]


def test_only_adapters_touch_vllm() -> None:
    """One adapter module per seam, in the engine's folder or in the list above."""
    assert not [
        name_of(path)
        for path in PRODUCT
        if ENGINE_FOLDER not in path.relative_to(ROOT).parts
        and name_of(path) not in ENGINE_ADAPTERS
        and ENGINE_PACKAGES.intersection(name.split(".")[0] for name in file_of(path).imports)
    ]


def is_test_module(name: str) -> bool:
    """Whether an imported name is of a file of tests, or of a folder that holds nothing else."""
    parts = name.split(".")
    in_tests = parts[0] == "tests" and len(parts) > 1
    return in_tests and (
        parts[1] in TEST_FOLDERS or any(part.startswith("test_") for part in parts[1:])
    )


def test_nothing_is_imported_from_test_modules() -> None:
    """What two of them need is in tests/harness."""
    assert not [
        name_of(path) for path in EVERYTHING if any(map(is_test_module, file_of(path).imports))
    ]


def test_benchmarks_are_imported_by_benchmarks_alone() -> None:
    assert not [
        name_of(path)
        for path in EVERYTHING
        if not name_of(path).startswith(MAY_IMPORT_BENCHMARKS)
        and any(f"{name}.".startswith("tests.bench.") for name in file_of(path).imports)
    ]


def test_no_file_names_the_machine_it_was_written_on() -> None:
    said = [
        f"{name_of(path)}: {needle}"
        for path, content in ((path, path.read_bytes()) for path in text_files())
        for needle in BANNED_TEXTS
        if needle.encode() in content
    ]
    assert not said


def test_asserts_are_on() -> None:
    """Broken invariants must end the process: nothing here may run under `python -O`."""
    assert __debug__


def test_no_other_distribution_provides_our_package_names() -> None:
    providers = packages_distributions()
    for package in PACKAGES:
        assert set(providers.get(package, [])) <= {DISTRIBUTION}
