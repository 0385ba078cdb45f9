"""TextLimits: llama-server's conditions on an answer's lines that end the answer, for editors."""

from __future__ import annotations

import time
from collections.abc import Callable

_BLANKS = " \t"


class TextLimits:
    """The limits of one answer."""

    def __init__(
        self, min_indent: int, seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """min_indent: the answer ends before a line, other than the first, that begins with fewer blanks. seconds: the
        answer ends at the first line end later than this after its first token."""
        self._min_indent = min_indent
        self._seconds = seconds
        self._clock = clock
        self._has_begun = False
        self.began_at = 0.0  # when the first text came
        # Blanks of the line so far; None: within the line's text, or in the first line.
        self._indent: int | None = None
        self.is_reached = False

    def take(self, text: str) -> str:
        """Takes the answer's next piece of text. Returns the part that belongs to the answer, and sets `is_reached` if
        the answer ends with it."""
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
