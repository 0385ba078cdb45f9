"""Replaces halves of surrogate pairs in JSON texts.

A client in JavaScript that cuts a text within an emoji sends one half of a pair, as `\\ud83d`. That is no Unicode
character, but the text comes back with every later request of the conversation.
"""

from __future__ import annotations

import re
from typing import Final

MAX_CHARS: Final = 8 << 20  # of a text that is searched: at worst 0.4 s
MAX_ESCAPES: Final = 100_000  # of surrogates in one text, in pairs or alone: 0.1 s
MAX_BACKSLASHES: Final = 256  # before an escape; behind more of them a half stays
_REPLACEMENT: Final = r"\ufffd"  # what Unicode has for a character that cannot be read
# A pair, or a half without the other.
_ESCAPE: Final = re.compile(
    r"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})", re.ASCII
)


def without_lone_surrogates(text: str) -> str:
    """Returns JSON with U+FFFD in place of each escaped half of a surrogate pair. A text that is longer than MAX_CHARS
    or has more than MAX_ESCAPES escaped surrogates comes back unchanged."""
    if len(text) > MAX_CHARS or not 0 < text.count("\\ud") + text.count("\\uD") <= MAX_ESCAPES:
        return text
    return _ESCAPE.sub(_whole, text)


def _whole(found: re.Match[str]) -> str:
    if found[1] is not None or _is_escaped(found.string, found.start()):
        return found[0]
    return _REPLACEMENT


def _is_escaped(text: str, at: int) -> bool:
    """Returns whether the backslash at `at` is itself escaped: an odd number of backslashes stands before it."""
    before = text[max(at - MAX_BACKSLASHES, 0) : at]
    number = len(before) - len(before.rstrip("\\"))
    return number % 2 == 1 or number == MAX_BACKSLASHES
