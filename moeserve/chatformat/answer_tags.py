"""Parses an answer that is in tags after the reasoning: `<answer>\n...\n</answer>`."""

from __future__ import annotations


class AnswerTags:
    """Removes the tags, and the line ends inside and after them, from an answer that begins with the opening tag. Any
    other answer is unchanged."""

    def __init__(self, opening: str, closing: str) -> None:
        """opening: the opening tag; "" if the format has none. A tag begins with `<` and has no other `<`."""
        self._opening = opening
        self._closing = closing
        self._is_decided = not opening
        self._has_tags = False
        self._space = ""  # white space before `_tag`
        self._tag = ""  # the beginning of a possible tag
        self._skips_lines = False

    def push(self, text: str) -> str:
        """Takes more text. Returns the part of the answer that is now certain."""
        if self._is_decided and not self._has_tags:
            return text
        return "".join(map(self._char, text))

    def finish(self) -> str:
        """Returns the text that was held back. No text follows."""
        return self._take_held()

    def _char(self, char: str) -> str:
        if not self._is_decided:
            return self._first(char)
        if not self._has_tags:
            return char
        if char == "\n" and not self._tag:
            self._space += "" if self._skips_lines else char
            return ""
        self._skips_lines = False
        tag = self._tag + char
        if tag == self._closing:
            self._drop_held()
            return ""
        if self._closing.startswith(tag):
            self._tag = tag
            return ""
        held = self._take_held()
        return held + self._char(char) if held and char in "<\n" else held + char

    def _first(self, char: str) -> str:
        if char.isspace() and not self._tag:
            self._space += char
            return ""
        self._tag += char
        if self._opening.startswith(self._tag):
            if self._tag == self._opening:
                self._is_decided = self._has_tags = True
                self._drop_held()
            return ""
        self._is_decided = True
        return self._take_held()

    def _drop_held(self) -> None:
        self._space = self._tag = ""
        self._skips_lines = True

    def _take_held(self) -> str:
        held = self._space + self._tag
        self._space = self._tag = ""
        return held
