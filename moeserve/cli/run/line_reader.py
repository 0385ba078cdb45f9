"""Reads the user's input: lines with editing and history, or several lines as one text."""

from __future__ import annotations

import os
import select
import sys
import termios
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

QUOTES: Final = '"""'
PROMPT: Final = ">>> "
# Between triple quotes no prompt is shown, so that text copied from the terminal contains no prompts.
CONTINUATION: Final = ""
PASTE_S: Final = 0.03  # a line that arrives sooner after the last one was pasted, not typed


class Entry(NamedTuple):
    text: str
    is_line: bool  # one line, so that it may be a command


class LineReader:
    """Reads entries. A typed line is an entry; between triple quotes several lines are one. Lines that are pasted
    together are one entry, too: the line editor marks them (bracketed paste); if it cannot, lines that arrive within
    PASTE_S of each other count as pasted."""

    def __init__(self, history: Iterable[str], read: Callable[[str], str]) -> None:
        self._read = read
        self._remember, self._marks_pastes = _set_up_readline(history)

    def read(self) -> Entry:
        """Reads one entry. Raises EOFError at the input's end, and KeyboardInterrupt for Ctrl-C, which drops the typed
        text."""
        first = self._read(PROMPT)
        if not self._marks_pastes:
            first = self._with_pasted(first)
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

    def _with_pasted(self, first: str) -> str:
        """Returns the line with those that were pasted with it. If the last one has no end, Enter ends it."""
        lines = [first]
        while _input_waits():
            try:
                lines.append(self._read(CONTINUATION))
            except EOFError:
                break
        return "\n".join(lines)

    def _remembered(self, entry: Entry) -> Entry:
        if entry.text.strip():
            self._remember(entry.text)
        return entry


def _input_waits() -> bool:
    """Returns whether more has been pasted at the terminal than was read; false for input from elsewhere."""
    if not sys.stdin.isatty():
        return False
    before = termios.tcgetattr(sys.stdin)
    by_character = termios.tcgetattr(sys.stdin)
    by_character[3] &= ~termios.ICANON  # else a last line without its end would not be seen
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, by_character)
        return bool(select.select([sys.stdin], [], [], PASTE_S)[0])
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _set_up_readline(history: Iterable[str]) -> tuple[Callable[[str], None], bool]:
    """Returns a function that adds an entry to the arrow keys' history, which without the readline module does nothing,
    and whether pasted lines come as one."""
    try:
        import readline  # input() edits lines from now on
    except ImportError:
        return lambda entry: None, False
    readline.set_auto_history(False)
    readline.clear_history()
    for entry in history:
        readline.add_history(entry)
    marks_pastes = os.environ.get("TERM") != "dumb" and "GNU" in (readline.__doc__ or "")  # not libedit
    if marks_pastes:
        readline.parse_and_bind("set enable-bracketed-paste on")  # which Python switches off
    return readline.add_history, marks_pastes
