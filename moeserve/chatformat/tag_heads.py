"""The text of an opening tag between its first word and its end, in formats whose tags carry a name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_QUOTED: Final = r"\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s\"'/>]+)"
_ATTRIBUTE: Final = re.compile(rf"\s+(name|string|type){_QUOTED}")
_NAMED: Final = re.compile(rf"(?:\s*=?\s*\bname)?{_QUOTED}(?:\s+(?:string|type){_QUOTED})*\s*(/?)")
_EMPTY: Final = re.compile(r"\s*/\s*")


@dataclass(frozen=True, slots=True)
class TagHead:
    """A tag's attributes."""

    name: str  # of a tool or an argument
    is_string: bool | None = None  # whether the value is a string; None: the tag does not say
    is_empty: bool = False  # the tag closes itself: `/>`


def named_head(text: str) -> TagHead | None:
    """Reads `=key`; models also write `="key"`, ` name="key"`, `=name="key"` and a type. Returns None for anything
    else."""
    match = _NAMED.fullmatch(text)
    if match is None:
        return plain_head(text[1:]) if text.startswith("=") else None
    name = (match[1].strip("\"'") if match[1][0] in "\"'" else match[1].rstrip("=")).strip()
    return TagHead(name, is_empty=bool(match[3])) if name else None


def attributes_or_named_head(text: str) -> TagHead | None:
    """Reads `name="key"`; models also write `=key`."""
    return named_head(text) if text.lstrip().startswith("=") else attributes_head(text)


def plain_head(text: str) -> TagHead | None:
    """Reads a tag that has only a name. Returns None for a tag without a name."""
    name = text.strip()
    return TagHead(name) if name else None


def attributes_head(text: str) -> TagHead | None:
    """Reads `name="key" string="true"` in either order, and ignores a `type`. Returns None if there is no name, or
    anything else."""
    found: dict[str, str] = {}
    at = 0
    while (match := _ATTRIBUTE.match(text, at)) is not None and match[1] not in found:
        found[match[1]] = match[2].strip("\"'") if match[2][0] in "\"'" else match[2]
        at = match.end()
    rest = text[at:]
    if not found.get("name", "").strip() or (rest.strip() and not _EMPTY.fullmatch(rest)):
        return None
    words = {"true": True, "false": False}
    return TagHead(found["name"].strip(), words.get(found.get("string", "").lower()), bool(rest.strip()))
