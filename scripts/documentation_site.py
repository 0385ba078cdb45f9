"""mkdocs' hooks for the documentation's site (mkdocs.yml): what stands where, and links that leave docs/.

The navigation is made of the index docs/README.md, which tests hold complete: a tab for each kind of page, a group for
each line that ends with a colon, and all pages of a folder where the index has the folder's README.md. Links to the
repository's other files become their paths, because a site has no such files.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
INDEX = "README.md"
Navigation = list[Any]  # of paths, and of {title: Navigation}

_KIND = re.compile(r"^## (.+)$")
_GROUP = re.compile(r"^([A-Z][^\[\]]*):$")
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)\s]*)?\)")
_FENCED = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
_LINK_WITH_TEXT = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def navigation(docs: Path = DOCS) -> Navigation:
    """The pages of `docs`, by kind and group, as its index has them."""
    text = (docs / INDEX).read_text()
    listed = {posixpath.normpath(link) for link in _LINK.findall(text)}
    entries: Navigation = [INDEX]
    kind: Navigation = entries
    group = entries
    for line in text.splitlines():
        if found := _KIND.match(line):
            kind = group = []
            entries.append({found[1]: kind})
        elif found := _GROUP.match(line):
            group = []
            kind.append({found[1]: group})
        else:
            group.extend(entry for link in _LINK.findall(line) for entry in _entries(docs, link, listed))
    return entries


def _entries(docs: Path, link: str, listed: set[str]) -> Iterator[Any]:
    """A linked page; with a folder's README.md all pages of the folder that are not `listed` themselves."""
    page = posixpath.normpath(link)
    if page.startswith("../") or not page.endswith(".md"):
        return
    folder, name = posixpath.split(page)
    if name != INDEX:
        yield page
        return
    others = sorted(f"{folder}/{path.name}" for path in (docs / folder).glob("*.md"))
    pages = [page, *(other for other in others if other != page and other not in listed)]
    if "/" in folder:
        yield {_title(docs / page): pages}
    else:
        yield from pages  # the folder is a kind, which has its group already


def _title(page: Path) -> str:
    return page.read_text().splitlines()[0].removeprefix("# ")


def pages_in(entries: Navigation) -> Iterator[str]:
    """All paths, in order."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for inner in entry.values():
                yield from pages_in(inner)


def without_outer_links(text: str, page: str) -> str:
    """A page's Markdown whose links to files outside docs/ are those files' paths in the repository."""
    folder = posixpath.join("docs", posixpath.dirname(page))

    def replaced(found: re.Match[str]) -> str:
        mark, words, link = found.groups()
        target = posixpath.normpath(posixpath.join(folder, link.partition("#")[0]))
        if target.startswith("docs/") or mark:
            return found[0]
        path = f"`{target}`"
        return path if posixpath.basename(target) in words else f"{words} ({path})"

    parts = _FENCED.split(text)
    parts[::2] = [_LINK_WITH_TEXT.sub(replaced, part) for part in parts[::2]]
    return "".join(parts)


# ---------------------------------------------------------------- what mkdocs calls


def on_config(config: Any) -> Any:
    config.nav = navigation()
    return config


def on_page_markdown(markdown: str, page: Any, **_: Mapping[str, Any]) -> str:
    return without_outer_links(markdown, page.file.src_uri)
