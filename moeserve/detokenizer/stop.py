"""Finds stop strings in text that arrives in pieces, wherever the pieces are cut.

The stop string that is complete first ends the text; if several end at the same character, the longest one. So the
result does not depend on how tokens divide the text, and is known when the last character of the stop string arrives.
Text that may still become a stop string is held back: the longest suffix of the text that is a proper prefix of a stop
string, and never more.
"""

from __future__ import annotations

from collections.abc import Iterable


class _Matcher:
    """The Knuth-Morris-Pratt matcher (1977): `matched` is the length of the longest prefix of `stop` that the text ends
    with. Amortised constant time a character, however repetitive the client's stop string is. Raises ValueError for an
    empty one."""

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("an empty stop string")
        self.stop = stop
        self.matched = 0
        self._border = _borders(stop)

    def push(self, char: str) -> bool:
        """Takes one more character. Returns True if the text now ends with the whole stop string."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._border[self.matched - 1]
        if self.stop[self.matched] == char:
            self.matched += 1
        if self.matched < len(self.stop):
            return False
        self.matched = self._border[-1]  # the next occurrence may overlap this one
        return True


def _borders(stop: str) -> list[int]:
    """Returns, for each prefix, the length of its longest proper prefix that is also its suffix."""
    border = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = border[length - 1]
        if stop[i] == stop[length]:
            length += 1
        border[i] = length
    return border


class StopFinder:
    """Passes text through until a stop string is complete, which is then in `hit`.

    `push` must not be called after a hit. `include_stop` keeps the stop string itself in the text.
    """

    def __init__(self, stops: Iterable[str], include_stop: bool) -> None:
        # Longest first, so that the longer of two that end at the same character is found.
        self._matchers = sorted(map(_Matcher, stops), key=lambda matcher: -len(matcher.stop))
        self._include_stop = include_stop
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str, may_hit: bool = True) -> str:
        """Returns the text that may be sent now: all but the suffix held back or, after a hit, all before the stop
        string.

        Without `may_hit`, a stop string that this text completes is ordinary text.
        """
        if not self._matchers:
            return text
        for position, char in enumerate(text):
            complete = [matcher.stop for matcher in self._matchers if matcher.push(char)]
            if complete and may_hit:
                return self._end(self._held + text[: position + 1], complete[0])
        shown = self._held + text
        cut = len(shown) - max(matcher.matched for matcher in self._matchers)
        self._held = shown[cut:]
        return shown[:cut]

    def flush(self) -> str:
        """Ends the text: returns the suffix held back, which did not become a stop string. No stop string that has
        begun may end in further text."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return held

    def _end(self, text: str, stop: str) -> str:
        self.hit = stop
        self._held = ""
        return text if self._include_stop else text[: -len(stop)]
