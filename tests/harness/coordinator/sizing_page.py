"""The commands of docs/sizing.md and what they print; run as a module, it writes them anew.

`python -m tests.harness.coordinator.sizing_page`
"""

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

from coordinator.cli import main
from tests.harness.coordinator.published_models import fill_cache

PAGE = Path(__file__).parents[3] / "docs" / "sizing.md"
BLOCK = re.compile(r"```console\n\$ aileron (.+)\n((?:.*\n)*?)```")


def printed(command: str) -> str:
    """What the command prints; the status is not looked at, as a plan may say that nothing fits."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main(shlex.split(command))
    return output.getvalue()


def rewritten(page: str) -> str:
    """The page with what its commands print now."""
    return BLOCK.sub(
        lambda found: f"```console\n$ aileron {found[1]}\n{printed(found[1])}```", page
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fill_cache(Path(folder))
        os.environ |= {"HF_HUB_CACHE": folder, "HF_HUB_OFFLINE": "1"}
        PAGE.write_text(rewritten(PAGE.read_text()))
