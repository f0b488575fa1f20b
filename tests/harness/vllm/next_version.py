"""Compares what the product needs of vLLM with the sources of another version, without its imports.

    pip download vllm==0.33.0 --no-deps --dest FOLDER
    unzip FOLDER/vllm-*.whl '*.py' '*.dist-info/*' -d SOURCES
    python -m tests.harness.vllm.next_version SOURCES [--write docs/vllm-next.md]

The wheel needs neither a GPU nor its torch. The status is 1 if something is missing. With --write,
the page's part between its marks is written anew.
"""

import argparse
import ast
import datetime
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.harness.vllm.version_reach import (
    Adapter,
    Change,
    Reach,
    adapters,
    changed_parameters,
    lost_attributes,
    lost_calls,
    reaches,
)
from tests.harness.vllm.vllm_sources import Sources

ROOT = Path(__file__).parents[3]
BEGIN, END = "<!-- begin: next_version -->", "<!-- end: next_version -->"
OPTION_CLASSES = (
    ("vllm.engine.arg_utils", "AsyncEngineArgs"),
    ("vllm.entrypoints.launchers.cli_args", "FrontendArgs"),
    ("vllm.entrypoints.common.cli_args", "FrontendArgs"),
)
"""Where vLLM's command line has its options as fields."""


def installed() -> Sources:
    """The version that is installed here."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is installed."
    return Sources(Path(spec.origin).parents[1])


def version_of(sources: Sources) -> str:
    """The version of some sources, by the folder that their installer leaves."""
    found = sorted(sources.folder.glob("vllm*.dist-info"))
    return found[0].name.split("-")[1].removesuffix(".dist") if found else "unknown"


def torch_of(sources: Sources) -> str:
    """The torch that some sources ask for."""
    for path in sources.folder.glob("vllm*.dist-info/METADATA"):
        if found := re.search(r"^Requires-Dist: (torch==[\w.]+)", path.read_text(), re.MULTILINE):
            return found[1]
    return "torch of an unknown version"


def option_names(sources: Sources) -> set[str]:
    """The fields that make up vLLM's command line."""
    names: set[str] = set()
    for module, name in OPTION_CLASSES:
        found = sources.find(module, name)
        for each, _ in sources.bases(found) if found is not None else ():
            for node in each.node.body if each and isinstance(each.node, ast.ClassDef) else ():
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(f"--{node.target.id.replace('_', '-')}")
    return names


def report(found: Sequence[Adapter], old: Sources, new: Sources) -> tuple[list[Reach], list[str]]:
    """What is missing, and the lines of the page."""
    checked = reaches(found, new)
    missing = [each for each in checked if each.fault]
    missing += [*lost_attributes(found, old, new), *lost_calls(found, old, new)]
    return missing, list(_lines(found, checked, missing, old, new))


def _lines(
    found: Sequence[Adapter],
    checked: Sequence[Reach],
    missing: Sequence[Reach],
    old: Sources,
    new: Sources,
) -> Iterator[str]:
    today = datetime.datetime.now(datetime.UTC).date()
    counts = Counter(each.kind for each in checked)
    yield (
        f"vLLM {version_of(new)} ({torch_of(new)}) beside {version_of(old)}, {today}: "
        f"{len(checked)} reaches of {len(found)} files."
    )
    yield ""
    yield "| kind | reaches | missing |"
    yield "|---|---|---|"
    for kind in ("import", "member", "call", "override", "inherited"):
        yield f"| {kind} | {counts[kind]} | {sum(each.kind == kind for each in missing)} |"
    lost = sum(each.kind == "attribute" for each in missing)
    yield f"| attribute of an object without a type | | {lost} |"
    yield ""
    yield "Missing:" if missing else "Nothing is missing."
    if missing:
        yield ""
        yield "| file | what | why |"
        yield "|---|---|---|"
        yield from (f"| `{each.file}` | `{each.what}` | {each.fault} |" for each in missing)
    changes = changed_parameters(found, old, new)
    yield ""
    yield "Methods of reached classes with other parameters, if the product uses the name:"
    yield ""
    yield from _changes(changes)
    options = option_names(old), option_names(new)
    yield ""
    yield f"Options that are new: {_names(options[1] - options[0])}."
    yield f"Options that are gone: {_names(options[0] - options[1])}."


def _changes(changes: Sequence[Change]) -> Iterator[str]:
    if not changes:
        yield "none."
        return
    yield "| method | file | before | after |"
    yield "|---|---|---|---|"
    for each in changes:
        yield f"| `{each.method}` | `{each.file}` | `{each.old}` | `{each.new}` |"


def _names(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


def main() -> int:
    """Print the report, or write it into the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sources", type=Path)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    found = list(adapters(ROOT))
    missing, lines = report(found, installed(), Sources(options.sources))
    text = "\n".join(lines)
    if options.write is None:
        print(text)
    else:
        page = options.write.read_text()
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        options.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
