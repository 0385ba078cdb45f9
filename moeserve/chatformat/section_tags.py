"""The tags of Kimi-K3's answers: words and attributes between control tokens.

<|open|>call tool="name" index="1"<|sep|>
<|close|>call<|sep|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"
END: Final = "<|end_of_msg|>"
WORDS: Final = (OPEN, CLOSE, SEP, END)

MAX_TAG_CHARS: Final = 1024
_WITH_ATTRIBUTES: Final = ("message", "call", "argument", "json")
_NAMES: Final = ("think", "response", "tools", *_WITH_ATTRIBUTES)
_NAME: Final = re.compile(r"\s*(\w*)")
_ATTRIBUTE: Final = re.compile(r"\s+([\w-]+)\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s\"']+)")


@dataclass(frozen=True, slots=True)
class Tag:
    is_open: bool
    name: str  # "": the tag names nothing
    attributes: Mapping[str, str] = field(default_factory=dict)

    def attribute(self, *names: str) -> str:
        """Returns the first of these attributes that the tag has; "" if it has none."""
        return next((self.attributes[name] for name in names if self.attributes.get(name)), "")


def opening(name: str, **attributes: str) -> str:
    """Returns an opening tag as the template writes it."""
    written = "".join(f' {key}="{_escaped(value)}"' for key, value in attributes.items())
    return f"{OPEN}{name}{written}{SEP}"


def closing(name: str) -> str:
    return f"{CLOSE}{name}{SEP}"


def tag_of(word: str, text: str) -> Tag | None:
    """Reads the text of a tag after OPEN or CLOSE. Returns None if it is no tag of the format."""
    name = _NAME.match(text)
    assert name is not None, "it matches every text"
    rest = text[name.end() :]
    if name[1] not in _NAMES and (name[1] or word == OPEN):
        return None
    attributes: dict[str, str] = {}
    if word == OPEN and name[1] in _WITH_ATTRIBUTES:
        at = 0
        while (match := _ATTRIBUTE.match(rest, at)) is not None:
            attributes[match[1]] = _unescaped(match[2].strip("\"'") if match[2][0] in "\"'" else match[2])
            at = match.end()
        rest = rest[at:]
    return None if rest.strip() else Tag(word == OPEN, name[1], attributes)


def may_be_tag(word: str, text: str) -> bool:
    """Returns whether more text may turn this into the text of a tag after OPEN or CLOSE."""
    at = text.rfind("<")
    if at >= 0 and any(one.startswith(text[at:]) for one in WORDS):
        text = text[:at]
    name = _NAME.match(text)
    assert name is not None, "it matches every text"
    rest = text[name.end() :]
    if not rest:
        return any(one.startswith(name[1]) for one in _NAMES)
    if name[1] not in _NAMES:
        return False
    return not rest.strip() or (word == OPEN and name[1] in _WITH_ATTRIBUTES and rest[0].isspace())


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")
