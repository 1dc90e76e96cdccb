"""Hooks of MkDocs: pages at the root of the repository, and files that pages link to, become part of the site."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
MADE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site, and where they stand."""
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: Any) -> None:
    """`__all__` names the vocabulary by a star, which only an import resolves: no fault of a page."""
    logging.getLogger("mkdocs.plugins.griffe").addFilter(lambda record: "__all__" not in record.getMessage())


def on_files(files: Files, config: Any) -> Files:
    """Add what is outside of docs/."""
    for name, source in MADE.items():
        files.append(File.generated(config, name, content=_read(ROOT / source)))
    linked = {path for file in files.documentation_pages() for path in _linked(file.src_uri)}
    for path in sorted(linked):
        files.append(File.generated(config, _address(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links lead to where things are in the site; one to a folder is its text."""

    def rewritten(link: re.Match[str]) -> str:
        path = _path(page.file.src_uri, link["target"])
        if path is None:
            return link[0]
        return link["text"] if path.is_dir() else f"[{link['text']}]({_address(path)}{link['anchor'] or ''})"

    return LINK.sub(rewritten, markdown)


def _linked(page: str) -> Iterator[Path]:
    """Files outside of docs/ that a page links to."""
    for link in LINK.finditer(_read(ROOT / MADE.get(page, f"docs/{page}"))):
        path = _path(page, link["target"])
        if path is not None and path.is_file() and _address(path).startswith("repository/"):
            yield path


def _path(page: str, target: str) -> Path | None:
    """What a link of a page is about, if that is in the repository."""
    path = ((ROOT if page in MADE else ROOT / "docs") / target).resolve()
    return path if path.exists() and path.is_relative_to(ROOT) else None


def _address(path: Path) -> str:
    """Where a file of the repository is in the site."""
    name = path.relative_to(ROOT).as_posix()
    pages = {source: page for page, source in MADE.items()}
    return pages.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else f"repository/{name}")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
