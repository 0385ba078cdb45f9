"""Replaces halves of surrogate pairs in JSON texts.

A client in JavaScript that cuts a text within an emoji sends one half of a pair, as `\\ud83d`. That is no Unicode
character, but the text comes back with every later request of the conversation.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

# Characters that are searched at once, while other threads wait: some 10 ms.
SLICE: Final = 256 << 10
MAX_HALVES: Final = 100_000  # that are replaced in one text
# What Unicode has for a character that cannot be read. `re` takes two backslashes for one.
_REPLACEMENT: Final = r"\\ufffd"
_HIGH: Final = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW: Final = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# In a text whose escaped backslashes have been taken out. The look behind is at the low half, too.
_HALF: Final = re.compile(f"{_HIGH}(?!{_LOW})|{_LOW}(?<!{_HIGH}{_LOW})")
# A character that is no part of an escape of hexadecimal digits, and not escaped itself: a text may be cut before it.
_APART: Final = re.compile(r"(?<!\\)[^\\u0-9a-fA-F]")


async def mend(text: str) -> str:
    """Returns `without_lone_surrogates(text)`; of a long text from a thread, so that the event loop goes on."""
    if len(text) <= SLICE:
        return without_lone_surrogates(text)
    return await asyncio.to_thread(without_lone_surrogates, text)


def without_lone_surrogates(text: str) -> str:
    """Returns JSON with U+FFFD in place of each escaped half of a surrogate pair. A text comes back unchanged if it has
    none, if it has more than MAX_HALVES, if it contains NUL (so it is not JSON), or if it cannot be cut into slices
    because SLICE characters in a row are escapes and hexadecimal digits only."""
    mended: list[str] = []
    begin = halves = 0
    while begin < len(text):
        end = _cut(text, begin)
        piece = text[begin:end]
        if end - begin > 2 * SLICE or "\0" in piece:
            return text
        if "\\u" in piece:
            # In a row of backslashes each second one is escaped, from the left, as `replace` takes them.
            piece, found = _HALF.subn(_REPLACEMENT, piece.replace("\\\\", "\0"))
            piece = piece.replace("\0", "\\\\")
            halves += found
        if halves > MAX_HALVES:
            return text
        mended.append(piece)
        begin = end
    return "".join(mended) if halves else text


def _cut(text: str, begin: int) -> int:
    """Returns where the slice from `begin` ends; the text's end if there is no place for a cut."""
    at = begin + SLICE
    found = _APART.search(text, at, at + SLICE)
    return len(text) if found is None else found.start()
