"""Links of the pages to files of the project, such as ../src/kilolayer/layers/sublayer.py: the site holds those files too."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\]\(([^)#\s]+)")


def outside(link: str, page: str) -> Path | None:
    """The file of the project that a page's link leads to, where it lies outside of docs/."""
    if ":" in link:
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") or not (ROOT / path).exists() else Path(path)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file that a page links to; a folder is the list of its files."""
    pages = [each for each in files.documentation_pages() if each.abs_src_path]
    found = {path for each in pages for link in LINK.findall(each.content_string) if (path := outside(link, each.src_uri))}
    for path in sorted(found):
        text = _listing(ROOT / path) if (ROOT / path).is_dir() else (ROOT / path).read_text()
        files.append(File.generated(config, _place(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let such links lead to the site's own copies."""

    def rewritten(found: re.Match[str]) -> str:
        path = outside(found[1], page.file.src_uri)
        if path is None:
            return found[0]
        return f"]({posixpath.relpath(_place(path), posixpath.dirname(page.file.src_uri) or '.')}"

    return LINK.sub(rewritten, markdown)


def _place(path: Path) -> str:
    return f"project/{path.as_posix()}.txt"


def _listing(folder: Path) -> str:
    return "\n".join(sorted(each.name for each in folder.iterdir() if not each.name.startswith((".", "__"))))
