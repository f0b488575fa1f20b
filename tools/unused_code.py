"""`python -m tools.unused_code`: prints functions, classes and imports that nothing uses; status 1.

vulture finds them by name. Fields and attributes are left out: messages and records have fields
that only a peer or a file reads. Methods in the adapters to vLLM override vLLM's, which calls them.
What others call by name is listed in pyproject.toml.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).resolve().parent.parent
KINDS = frozenset({"class", "function", "import", "method", "property", "unreachable_code"})
METHODS = frozenset({"method", "property"})
ADAPTERS = "engine"
"""Folder of the modules that subclass vLLM's classes."""
CONFIDENCE_MIN = 60
"""What vulture gives a function that no name refers to, in percent."""


def unused(root: Path = ROOT) -> list[str]:
    """Return a line for each thing that nothing uses."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["vulture"]
    finder = Vulture(
        ignore_names=settings["ignore_names"], ignore_decorators=settings["ignore_decorators"]
    )
    finder.scavenge([root / folder for folder in settings["paths"]])
    return [
        f"{item.filename.relative_to(root)}:{item.first_lineno}: unused {item.typ} {item.name}"
        for item in finder.get_unused_code(min_confidence=CONFIDENCE_MIN)
        if item.typ in KINDS and not (item.typ in METHODS and ADAPTERS in item.filename.parts)
    ]


if __name__ == "__main__":
    found = unused()
    print("\n".join(found) or "no unused code")
    sys.exit(bool(found))
