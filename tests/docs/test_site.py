"""The site is built without a network, every link leads somewhere, and pages fetch nothing."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.harness.cells.servers import ROOT

pytestmark = pytest.mark.timeout(300)

BUILD_LIMIT_S = 200
PAGES_MIN = 80
LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
"""Element -> attribute whose URL a browser fetches by itself."""


class Fetched(HTMLParser):
    """What a page makes a browser fetch, and its ids and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.classes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take one element."""
        values = dict(attrs)
        self.classes |= set((values.get("class") or "").split())
        is_canonical = tag == "link" and values.get("rel") not in ("stylesheet", "icon", "preload")
        if tag in LOADS and not is_canonical and (url := values.get(LOADS[tag])):
            self.urls.append(url)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; mkdocs ends with status 1 for a link to a page or heading that is not there."""
    folder = tmp_path_factory.mktemp("site")
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            # Were something fetched, it would go here and fail.
            **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9"),
        },
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = {str(path.relative_to(site)) for path in site.rglob("index.html")}
    assert len(pages) >= PAGES_MIN
    for name in ("configuration", "cli", "api", "architecture", "from-vllm", "adr/0023"):
        assert any(page.startswith(name) for page in pages), name


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        page = Fetched(path.read_text())
        outside = [url for url in page.urls if re.match(r"(\w+:)?//", url)]
        assert not outside, path
        # The theme's script would fetch Mermaid from a server for such an element.
        assert "mermaid" not in page.classes, path
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text()), path
    for path in site.rglob("*.svg"):
        assert not re.search(r"(href|src)=['\"]https?:", path.read_text()), path


def test_images_and_scripts_of_pages_are_there(site: Path) -> None:
    for path in site.rglob("index.html"):
        for url in Fetched(path.read_text()).urls:
            if url.startswith("data:"):
                continue
            assert (path.parent / url.partition("?")[0].partition("#")[0]).exists(), (path, url)


def test_a_wrong_link_ends_the_build(tmp_path: Path) -> None:
    """Otherwise nothing above would be checked."""
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings.replace("hooks: [tools/site.py]\n", ""))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Here\n\n[there](#nowhere)\n")
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=tmp_path,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 1
    assert "nowhere" in ended.stderr
