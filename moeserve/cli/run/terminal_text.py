"""Makes foreign text safe for a terminal: a model's answers, and names and errors from a server.

A terminal obeys escape sequences in the text that it shows: they move the cursor, write the clipboard (OSC 52), hide
links (OSC 8), or make the terminal send input of its own. Source: ECMA-48, and xterm's control sequences.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

_ESCAPE: Final = "\x1b"
_CSI: Final = "\x9b"
_STRING_END: Final = "\x9c"
_BELL: Final = "\a"
# Beginnings of a string that ends with ST: DCS, SOS, OSC, PM, APC, as one C1 character or after ESC.
_STRINGS: Final = "\x90\x98\x9d\x9e\x9f"
_STRINGS_BEHIND_ESCAPE: Final = "PX]^_"
# C0 but tab and line feed, DEL, C1, what overrides or isolates the direction of text, halves of surrogate pairs.
_UNSAFE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SURROGATES: Final = ("\ud800", "\udfff")
MOST_LINE_CHARS: Final = 600


class _State(Enum):
    TEXT = auto()
    ESCAPE = auto()  # behind ESC
    CSI = auto()  # within ESC [ ...
    STRING = auto()  # within a string: ESC ] ..., for example
    STRING_ESCAPE = auto()  # after an ESC within a string


class TerminalFilter:
    """Removes escape sequences, control characters and overrides of the text's direction from text that comes in
    pieces.

    Tabs and line feeds stay. A control string (such as OSC) ends at the latest with its line, so that an unclosed one
    hides only that line.
    """

    def __init__(self) -> None:
        self._state = _State.TEXT

    def take(self, piece: str) -> str:
        """Returns the part of the piece that may be shown."""
        if self._state is _State.TEXT and _UNSAFE.search(piece) is None:
            return piece
        return "".join(map(self._take, piece))

    def _take(self, char: str) -> str:
        match self._state:
            case _State.STRING_ESCAPE if char == "\\":
                self._state = _State.TEXT
                return ""
            case _State.ESCAPE | _State.STRING_ESCAPE:
                return self._behind_escape(char)
            case _State.CSI:
                if " " <= char <= "?":
                    return ""
                self._state = _State.TEXT
                return "" if "@" <= char <= "~" else self._take(char)
            case _State.STRING:
                return self._within_string(char)
        return self._text(char)

    def _behind_escape(self, char: str) -> str:
        if " " <= char <= "/":
            return ""
        self._state = _State.TEXT
        if char == "[":
            self._state = _State.CSI
        elif char in _STRINGS_BEHIND_ESCAPE:
            self._state = _State.STRING
        elif not "0" <= char <= "~":
            return self._text(char)
        return ""

    def _within_string(self, char: str) -> str:
        if char == _ESCAPE:
            self._state = _State.STRING_ESCAPE
        elif char in (_BELL, _STRING_END, "\n"):
            self._state = _State.TEXT
            return "\n" if char == "\n" else ""
        return ""

    def _text(self, char: str) -> str:
        if char == _ESCAPE:
            self._state = _State.ESCAPE
        elif char == _CSI:
            self._state = _State.CSI
        elif char in _STRINGS:
            self._state = _State.STRING
        elif _SURROGATES[0] <= char <= _SURROGATES[1]:
            return "\ufffd"
        return "" if _UNSAFE.match(char) else char


def safe_text(text: str) -> str:
    """Returns a whole text as `TerminalFilter` would pass it."""
    return TerminalFilter().take(text)


def safe_line(text: str) -> str:
    """Returns a name or a message as one safe line of at most MOST_LINE_CHARS characters."""
    line = " ".join(safe_text(text).split())
    return line if len(line) <= MOST_LINE_CHARS else line[:MOST_LINE_CHARS] + "..."
