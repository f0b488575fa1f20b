"""Hooks of mkdocs: bring into the site what pages link to outside docs/.

Pages of the repository's root become pages of the site. A link to any other file of the repository
leads to a copy of it, and a link to a folder to a list of its files, so that every link of the
Markdown files works in the repository and in the site alike. Figures in Mermaid's language are
replaced by pictures that are drawn beforehand: readers' browsers fetch nothing.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}
"""Page of the repository's root -> page of the site."""
COPIES = "source"
"""Folder of the site with copies of the repository's files."""
FIGURES = "figures"
"""Folder of docs/ with one drawing for each Mermaid figure, named by the figure's hash."""
INDEX_TITLES = {"docs/adr": "Decisions"}
"""Folder -> heading of the list of its files."""

_LINK = re.compile(r"(?<=\]\()([^)\s#?]+)((?:#[^)\s]*)?)(?=[)\s])")
_FENCE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)\s*$)", re.MULTILINE | re.DOTALL)
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and copies of what any page links to."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page_file in list(files.documentation_pages()):
        for target in _targets(page_file.content_string, source_of(page_file.src_uri)):
            _add_copy(target, files, config)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between files of the site."""
    del config, files
    source = source_of(page.file.src_uri)
    pieces = _FENCE.split(_with_drawings(markdown, page.file.src_uri))
    for number in range(0, len(pieces), 2):
        pieces[number] = _LINK.sub(
            lambda link: _relinked(link, source, page.file.src_uri), pieces[number]
        )
    return "".join(pieces)


def source_of(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    of_root = {uri: source for source, uri in ROOT_PAGES.items()}
    return of_root.get(page, f"{DOCS}/{page}")


def place_of(target: str) -> str:
    """Return the path in the site of a file or folder of the repository."""
    if target in ROOT_PAGES:
        return ROOT_PAGES[target]
    path = ROOT / target
    if path.is_dir():
        if not target.startswith(f"{DOCS}/"):
            return f"{COPIES}/{target}/index.md"
        has_readme = (path / "README.md").exists()
        return place_of(f"{target}/{'README' if has_readme else 'index'}.md")
    if target.startswith(f"{DOCS}/"):
        return target.removeprefix(f"{DOCS}/")
    # A copy that ended in .md would become a page whose own links lead out of the site.
    return f"{COPIES}/{target}.txt" if target.endswith(".md") else f"{COPIES}/{target}"


def figure_of(mermaid: str) -> str:
    """Return the name of the drawing of a figure."""
    return f"{hashlib.sha256(mermaid.strip().encode()).hexdigest()[:12]}.svg"


def _with_drawings(markdown: str, page: str) -> str:
    def drawn(found: re.Match[str]) -> str:
        # As a path of the repository, which is translated with the page's other links.
        source = posixpath.dirname(source_of(page)) or "."
        place = posixpath.relpath(f"{DOCS}/{FIGURES}/{figure_of(found[1])}", source)
        return f"![Figure]({place})"

    return _MERMAID.sub(drawn, markdown)


def _resolve(link: str, source: str) -> str | None:
    """Return what a relative link leads to, as a path in the repository; None for other links."""
    if re.match(r"[a-z]+:|/", link):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return target if (ROOT / target).exists() and not target.startswith("..") else None


def _targets(markdown: str, source: str) -> set[str]:
    links = (link[1] for link in _LINK.finditer("".join(_FENCE.split(markdown)[::2])))
    return {target for link in links if (target := _resolve(link, source)) is not None}


def _relinked(link: re.Match[str], source: str, page: str) -> str:
    target = _resolve(link[1], source)
    if target is None:
        return link[0]
    return posixpath.relpath(place_of(target), posixpath.dirname(page) or ".") + link[2]


def _add_copy(target: str, files: Files, config: MkDocsConfig) -> None:
    place = place_of(target)
    if files.get_file_from_path(place) is not None:
        return
    path = ROOT / target
    if not path.is_dir():
        files.append(File.generated(config, place, abs_src_path=str(path)))
        return
    names = sorted(each.name for each in path.iterdir() if each.is_file())
    lines = [f"- [{_title(path / name)}]({_beside(place, f'{target}/{name}')})" for name in names]
    text = f"# {INDEX_TITLES.get(target, target)}\n\n" + "\n".join(lines) + "\n"
    files.append(File.generated(config, place, content=text))
    for name in names:
        _add_copy(f"{target}/{name}", files, config)


def _title(path: Path) -> str:
    """Return the heading of a page, with its number for a decision, or the name of a file."""
    if path.suffix != ".md":
        return path.name
    first = path.read_text().partition("\n")[0]
    return first.removeprefix("# ") or path.name


def _beside(page: str, target: str) -> str:
    return posixpath.relpath(place_of(target), posixpath.dirname(page))
