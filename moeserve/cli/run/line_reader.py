"""Reads the user's input: lines with editing and history, or several lines as one text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

QUOTES: Final = '"""'
PROMPT: Final = ">>> "
# Between triple quotes no prompt is shown, so that text copied from the terminal contains no prompts.
CONTINUATION: Final = ""


class Entry(NamedTuple):
    text: str
    is_line: bool  # one line, so that it may be a command


class LineReader:
    """Reads entries. Pasted lines are one entry if the terminal marks them (bracketed paste). Typed lines are one entry
    between triple quotes."""

    def __init__(self, history: Iterable[str], read: Callable[[str], str]) -> None:
        self._read = read
        self._remember = _set_up_readline(history)

    def read(self) -> Entry:
        """Reads one entry. Raises EOFError at the input's end, and KeyboardInterrupt for Ctrl-C, which drops the typed
        text."""
        first = self._read(PROMPT)
        if "\n" in first:  # pasted: triple quotes in it are part of the text
            return self._remembered(Entry(first.strip("\n"), False))
        if first.count(QUOTES) % 2 == 0:
            text = first.strip()
            if len(text) >= 2 * len(QUOTES) and text.startswith(QUOTES) and text.endswith(QUOTES):
                return self._remembered(Entry(text[len(QUOTES) : -len(QUOTES)], False))
            return self._remembered(Entry(text, True))
        before, _, rest = first.rpartition(QUOTES)
        lines = [before + rest]
        while True:
            try:
                line = self._read(CONTINUATION)
            except EOFError:
                break  # this Ctrl-D ends the text; the next one ends the chat
            text, quotes, after = line.rpartition(QUOTES)
            lines.append(text + after if quotes else line)
            if quotes:
                break
        return self._remembered(Entry("\n".join(lines).strip("\n"), False))

    def _remembered(self, entry: Entry) -> Entry:
        if entry.text.strip():
            self._remember(entry.text)
        return entry


def _set_up_readline(history: Iterable[str]) -> Callable[[str], None]:
    """Returns a function that adds an entry to the arrow keys' history. Without the readline module it does nothing."""
    try:
        import readline  # input() edits lines from now on
    except ImportError:
        return lambda entry: None
    readline.set_auto_history(False)
    readline.clear_history()
    for entry in history:
        readline.add_history(entry)
    if os.environ.get("TERM") != "dumb":
        readline.parse_and_bind("set enable-bracketed-paste on")  # which Python switches off
    return readline.add_history
