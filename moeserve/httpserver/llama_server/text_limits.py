"""TextLimits: llama-server's ends of an answer that depend on its lines, for editors."""

from __future__ import annotations

import time
from collections.abc import Callable

_BLANKS = " \t"


class TextLimits:
    """The limits of one answer."""

    def __init__(
        self, min_indent: int, seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`min_indent`: blanks that each line but the first must begin with. `seconds` from the first token on, after
        which the answer ends at a line's end."""
        self._min_indent = min_indent
        self._seconds = seconds
        self._clock = clock
        self._has_begun = False
        self.began_at = 0.0  # when the first text came
        self._indent: int | None = None  # of the line so far; None: within its text, or in the first line
        self.is_reached = False

    def take(self, text: str) -> str:
        """Returns what belongs to the answer of its next piece of text; sets `is_reached` where it ends with that."""
        now = self._clock()
        if not self._has_begun:
            self._has_begun, self.began_at = True, now
        if self._min_indent:
            text = self._indented(text)
        if self._seconds is not None and "\n" in text and now - self.began_at > self._seconds:
            self.is_reached = True
        return text

    def _indented(self, text: str) -> str:
        for place, character in enumerate(text):
            if character == "\n":
                self._indent = 0
            elif self._indent is not None and character in _BLANKS:
                self._indent += 1
            elif self._indent is not None:
                if self._indent < self._min_indent:
                    self.is_reached = True
                    return text[:place]
                self._indent = None
        return text
