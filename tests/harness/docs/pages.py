"""The generated pages, and what makes each of them."""

from collections.abc import Callable
from pathlib import Path

from tests.harness.cells.servers import ROOT
from tests.harness.docs import api_page, command_page, configuration_page, vllm_page

DOCS = ROOT / "docs"
PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "configuration.md": configuration_page.page,
    DOCS / "aileron.yaml": configuration_page.example,
    DOCS / "cli.md": command_page.page,
    DOCS / "api.md": api_page.page,
    DOCS / "from-vllm.md": vllm_page.page,
}
